"""`mezzo build`: the compiled tier of the kernels."""

import typer


def build() -> int:
    """Compile the kernels of auto_cast, once, in half a minute: calls that need no cast then no longer go through Python."""
    from mezzo.amp import build_kernels  # torch takes seconds to import: not for --version and --help

    typer.echo("compiling, about half a minute ...", err=True)
    typer.echo(str(build_kernels()))
    return 0
