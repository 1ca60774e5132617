"""`mezzo compare`: a model trained in float32 and at some levels, side by side."""

import json
from typing import TYPE_CHECKING, Annotated

from mezzo._options import Option, split_commas
from mezzo.cli._common import Device, Fp8, Json, LearningRate
from mezzo.cli._show import progress_bar
from mezzo.dtypes import HALF_SPELLINGS
from mezzo.files import say
from mezzo.report import markdown_table

if TYPE_CHECKING:
    from mezzo.bench import Comparison


def compare(
    model: Annotated[str | None, Option("Your own model.", metavar="FILE:FACTORY", default_text="SimpleNet")] = None,
    size: Annotated[int | None, Option("Width of SimpleNet.", default_text="8192, 4096 or 1024, by device")] = None,
    batch_size: Annotated[int | None, Option("Batch size, if the factory takes one.", default_text="by device")] = None,
    steps: Annotated[int, Option("Timed steps of each mode, after three untimed ones.")] = 20,
    dtype: Annotated[
        str | None,
        Option("float16 or bfloat16.", choices=tuple(HALF_SPELLINGS), default_text="float16, or bfloat16 by CPU"),
    ] = None,
    device: Device = None,
    learning_rate: LearningRate = 0.003,
    levels: Annotated[
        tuple[str, ...], Option("Levels beside float32, with commas: O1, O2, O3.", parse=split_commas)
    ] = ("O1", "O2"),
    fp8: Fp8 = None,
    as_json: Json = False,
) -> int:
    """Train a model in float32 and AMP, side by side.

    Prints time per step, loss, speed-up, memory and operators of float32, AMP-O1 and AMP-O2 (or AMP-O3).
    """
    from mezzo.bench import compare as run_comparison  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = run_comparison(
            model=model,
            size=size,
            batch_size=batch_size,
            steps=steps,
            dtype=dtype,
            device=device,
            learning_rate=learning_rate,
            levels=levels,
            fp8=fp8,
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
