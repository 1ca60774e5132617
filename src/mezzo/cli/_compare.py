"""`mezzo compare`: a model trained in float32 and at some levels, side by side."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli._options import FP8_HELP, read_fp8
from mezzo.cli._show import progress_bar
from mezzo.files import say
from mezzo.report import markdown_table

if TYPE_CHECKING:
    from mezzo.bench import Comparison


def compare(
    model: Annotated[str | None, typer.Option(metavar="FILE:FACTORY", help="Your own model [SimpleNet].")] = None,
    size: Annotated[int | None, typer.Option(help="Width of SimpleNet [8192, 4096 or 1024, by device].")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of the batch [by device], also of a factory that takes batch_size.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each mode, after three for warm-up.")] = 20,
    dtype: Annotated[
        str | None, typer.Option(help="float16 or bfloat16 [float16; bfloat16 on a CPU with units for it].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:i [the GPU if there is one].")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of the SGD that trains it.")] = 0.003,
    levels: Annotated[str, typer.Option(help="Compared with float32: some of O1, O2, O3, with commas.")] = "O1,O2",
    fp8: Annotated[str | None, typer.Option(help=FP8_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Train a model in float32, AMP-O1 and AMP-O2 (or AMP-O3): time per step, loss, speed-up, memory, operators."""
    from mezzo.bench import compare as run_comparison  # torch takes seconds to import: not for --version and --help
    from mezzo.cli._choice import check_dtype

    dtype = None if dtype is None else check_dtype(dtype)
    with progress_bar() as report:
        result = run_comparison(
            model=model,
            size=size,
            batch_size=batch_size,
            steps=steps,
            dtype=dtype,
            device=device,
            learning_rate=learning_rate,
            levels=[level.strip() for level in levels.split(",") if level.strip()],
            fp8=read_fp8(fp8),
            progress=report,
        )
    say(json.dumps(result.to_dict(), indent=2) if as_json else _as_text(result))
    return 0


def _as_text(result: "Comparison") -> str:
    settings, machine = result.settings, result.machine
    width = "" if settings.size is None else f"size {settings.size}, "
    batch = "its own batch" if settings.batch_size is None else f"batch size {settings.batch_size}"
    title = f"{settings.model}, {width}{batch}, {settings.steps} steps, AMP in {settings.dtype}"
    versions = f"torch {machine.torch_version}, driver {machine.driver_version}"
    operators = f"Operators of one recorded {result.operators_of} step\n{result.operator_table.rstrip()}"
    parts = [
        title,
        markdown_table(result.table()),
        f"{markdown_table(machine.table())}\n{versions}",
        operators,
        result.note,
    ]
    return "\n\n".join(part for part in parts if part)
