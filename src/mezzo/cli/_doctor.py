"""`mezzo doctor`: what keeps a model's training step from being faster, and what to do about it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mezzo.cli._options import FP8_HELP, read_fp8
from mezzo.cli._show import progress_bar
from mezzo.files import say


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="FILE:FACTORY, or a name of 'mezzo models'.")],
    level: Annotated[str, typer.Option(help="O1, O2 or O3.")] = "O1",
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    fp8: Annotated[str | None, typer.Option(help=FP8_HELP)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of the batch, also of a factory that takes batch_size [16].")
    ] = None,
    image_size: Annotated[int, typer.Option(help="Side of the images, for a network of 'mezzo models'.")] = 224,
    steps: Annotated[int, typer.Option(help="Timed steps of each setup.")] = 10,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:i [the GPU if there is one].")] = None,
    loader: Annotated[
        str | None, typer.Option(metavar="FILE:FACTORY", help="Makes a data loader: is it fast enough?")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also measure what each change brings.")] = False,
    apply: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the safe changes there, after measuring them.")
    ] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Measure a training step in float32 and in AMP, and advise: shapes, layout, leaks, launches, data."""
    from mezzo.bench import examine_model  # torch takes seconds to import: not for --version and --help
    from mezzo.cli._choice import check_dtype

    for name, path in (("--apply", apply), ("--page", page)):
        if path is not None and path.is_dir():
            raise ValueError(f"{name} {path}: is a folder; give the name of a file")
    dtype = check_dtype(dtype)
    with progress_bar() as report:
        found = examine_model(
            model, batch_size=batch_size, image_size=image_size, device=device, loader=loader, level=level, dtype=dtype,
            fp8=read_fp8(fp8), steps=steps, measure_gains=measure or apply is not None, progress=report,
        )  # fmt: skip
    say(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if apply is not None:
        found.changes.write(apply)
        said = "holds no changes" if found.changes.are_none else "apply_changes(model, file) makes them"
        say(f"{apply}: {said}", err=True)
    if page is not None:
        from mezzo.proof import write_advice_page

        write_advice_page(found, page)
    return 0
