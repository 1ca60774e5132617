"""`mezzo build`: the compiled tier of the kernels."""

from mezzo.files import say


def build() -> int:
    """Compile the kernels of auto_cast, once.

    This takes half a minute. Calls that need no cast then no longer go through Python.
    """
    from mezzo.amp import build_kernels  # torch takes seconds to import: not for --version and --help

    say("compiling, about half a minute ...", err=True)
    say(str(build_kernels()))
    return 0
