"""`mezzo bisect`: what of a model must stay in float32, or out of FP8."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo.cli._options import FP8_HELP, read_fp8
from mezzo.cli._show import progress_bar
from mezzo.files import say
from mezzo.report import markdown_table

if TYPE_CHECKING:
    from mezzo.proof import Bisection, Evaluation


def bisect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="FILE:FACTORY, or a name of `mezzo models`.")],
    by: Annotated[str, typer.Option(help="modules or ops.")] = "modules",
    metric: Annotated[str, typer.Option(help="loss, finite or output.")] = "loss",
    tolerance: Annotated[float | None, typer.Option(help="Metric that passes [by metric and dtype].")] = None,
    level: Annotated[str, typer.Option(help="OD, O1, O2, or O3: what must stay in half.")] = "O1",
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    fp8: Annotated[str | None, typer.Option(help=FP8_HELP)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:i [the GPU if there is one].")] = None,
    steps: Annotated[int, typer.Option(help="Training steps of an evaluation.")] = 5,
    learning_rate: Annotated[float, typer.Option(help="Of the SGD that trains it.")] = 0.003,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of the batch, also of a factory that takes batch_size [8].")
    ] = None,
    max_evaluations: Annotated[int, typer.Option(help="More are not made.")] = 60,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the list file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Find the smallest set of modules or operators that must stay in float32 (O3: in half) for a training to pass."""
    if output is not None and output.is_dir():
        raise ValueError(f"--output {output}: is a folder; give the name of a file, such as fp32.yml")
    from mezzo.bench import bisect_model  # torch takes seconds to import: not for --help
    from mezzo.cli._choice import check_dtype

    seen: list[Evaluation] = []
    try:
        with progress_bar() as report:

            def hear(one: "Evaluation", most: int) -> None:
                seen.append(one)
                report("bisect", one.number, most)

            result = bisect_model(
                model, batch_size=batch_size, device=device, by=by, metric=metric, tolerance=tolerance, level=level,
                dtype=check_dtype(dtype), steps=steps, learning_rate=learning_rate, max_evaluations=max_evaluations,
                fp8=read_fp8(fp8), progress=hear,
            )  # fmt: skip
            report("bisect", len(seen), len(seen))
    except KeyboardInterrupt:
        say(_so_far(seen, "half" if level.upper() == "O3" else "float32"), err=True)
        raise
    if output is not None and result.outcome != "not the cause":
        result.write(output)
        say(f"lists written to {output}", err=True)
    title = f"{model}, {dtype} {level}, {len(seen)} evaluations, {max_evaluations} allowed"
    say(json.dumps(result.to_dict(), indent=2) if as_json else _as_text(title, result))
    return 0 if result.has_answer else 1


def _as_text(title: str, result: "Bisection") -> str:
    return "\n\n".join((title, markdown_table(result.table()), result.summary()))


def _so_far(seen: "list[Evaluation]", stays: str = "float32") -> str:
    """Return what is known when somebody stops the search."""
    passing = [one for one in seen if one.passed]
    if not passing:
        return f"stopped after {len(seen)} evaluations; no set that passes is known yet"
    best = min(passing, key=lambda one: len(one.kept))
    return f"stopped after {len(seen)} evaluations; passes with {len(best.kept)} in {stays}: {', '.join(best.kept)}"
