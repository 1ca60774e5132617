"""`mezzo bisect`: find the parts of a model that must stay in float32, or out of FP8."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mezzo._options import Option
from mezzo.cli._common import Device, Dtype, Fp8, Json, LearningRate, model_names
from mezzo.cli._show import progress_bar
from mezzo.files import say
from mezzo.report import markdown_table

if TYPE_CHECKING:
    from mezzo.proof import Bisection, Evaluation


def bisect(
    model: Annotated[
        str,
        Option("FILE:FACTORY, or a name of `mezzo models`.", metavar="MODEL", suggest=model_names, is_argument=True),
    ],
    by: Annotated[str, Option("modules or ops.", suggest=lambda: ("modules", "ops"))] = "modules",
    metric: Annotated[str, Option("loss, finite or output.", suggest=lambda: ("loss", "finite", "output"))] = "loss",
    tolerance: Annotated[
        float | None, Option("Largest metric that passes.", default_text="by metric and dtype")
    ] = None,
    level: Annotated[
        str, Option("OD, O1, O2 or O3 (finds what must stay in half).", suggest=lambda: ("OD", "O1", "O2", "O3"))
    ] = "O1",
    dtype: Dtype = "float16",
    fp8: Fp8 = None,
    device: Device = None,
    steps: Annotated[int, Option("Training steps of an evaluation.")] = 5,
    learning_rate: LearningRate = 0.003,
    batch_size: Annotated[
        int | None, Option("Batch size, if the factory takes one or MODEL is a name.", default_text="8")
    ] = None,
    max_evaluations: Annotated[int, Option("Maximum number of evaluations.")] = 60,
    output: Annotated[Path | None, Option("Write the lists to this file.", metavar="FILE")] = None,
    as_json: Json = False,
) -> int:
    """Find what must stay in float32 for a training to pass.

    Searches the smallest set of modules or operators; at O3 the set that must stay in half.
    """
    if output is not None and output.is_dir():
        raise ValueError(f"--output {output}: is a folder; give the name of a file, such as fp32.yml")
    from mezzo.bench import bisect_model  # torch takes seconds to import: not for --help

    seen: list[Evaluation] = []
    try:
        with progress_bar() as report:

            def note(one: "Evaluation", most: int) -> None:
                seen.append(one)
                report("bisect", one.number, most)

            result = bisect_model(
                model, batch_size=batch_size, device=device, by=by, metric=metric, tolerance=tolerance, level=level,
                dtype=dtype, steps=steps, learning_rate=learning_rate, max_evaluations=max_evaluations,
                fp8=fp8, progress=note,
            )  # fmt: skip
            report("bisect", len(seen), len(seen))
    except KeyboardInterrupt:
        say(_summarize_stopped(seen, "half" if level.upper() == "O3" else "float32"), err=True)
        raise
    if output is not None and result.outcome != "not the cause":
        result.write(output)
        say(f"lists written to {output}", err=True)
    title = f"{model}, {dtype} {level}, {len(seen)} evaluations, {max_evaluations} allowed"
    say(json.dumps(result.to_dict(), indent=2) if as_json else _as_text(title, result))
    return 0 if result.has_answer else 1


def _as_text(title: str, result: "Bisection") -> str:
    return "\n\n".join((title, markdown_table(result.table()), result.summary()))


def _summarize_stopped(seen: "list[Evaluation]", stays: str = "float32") -> str:
    """Return what is known when the search is interrupted."""
    passing = [one for one in seen if one.passed]
    if not passing:
        return f"stopped after {len(seen)} evaluations; no set that passes is known yet"
    best = min(passing, key=lambda one: len(one.kept))
    return f"stopped after {len(seen)} evaluations; passes with {len(best.kept)} in {stays}: {', '.join(best.kept)}"
