"""`bisect`: which modules or operators of a model must stay in float32, or out of FP8, for a run to pass."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from mezzo import amp
from mezzo._arguments import check_at_least
from mezzo.dtypes import dtype_name, parse_half_dtype
from mezzo.files import write_text
from mezzo.proof._bisect_candidates import Stages, check_candidates, module_stages, operator_stages
from mezzo.proof._bisect_runs import BY, Runs, RunSettings
from mezzo.proof._search import Outcome, SearchResult, minimal_set
from mezzo.record import operator_log

MAX_EVALUATIONS = 60
SHOWN = 10
MIN_EVALUATIONS = 3
"""One with nothing in float32, one with all modules without children, one with all modules."""

TOLERANCES = {
    "loss": {"float16": 0.03, "bfloat16": 0.05},
    "output": {"float16": 0.02, "bfloat16": 0.1},
    "finite": {"float16": 0.0, "bfloat16": 0.0},
}
"""Default tolerances. Healthy networks stay below: the losses of all networks of `mezzo models`, untrained and on noise,
differed by up to 0.017 (float16) and 0.034 (bfloat16) in five steps, on a CPU and an H200."""

FP8_TOLERANCES = {"loss": 0.1, "output": 0.3, "finite": 0.0}
"""Default tolerances at O3: FP8 rounds an operand by up to 1/16; a product is off by 4 %, several by more."""

_METRIC_TEXTS = {"loss": "loss difference", "output": "output difference", "finite": "steps not finite"}
"""What a reader sees: the value of the metric `loss` is no loss."""

RunMetric = Callable[[frozenset[str]], float]
"""Returns the metric of a run with these names in float32; NaN and inf fail."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One run of a bisection."""

    number: int
    """From 1."""
    kept: tuple[str, ...]
    """Names in float32."""
    value: float
    """Value of the metric."""
    passed: bool


Progress = Callable[[Evaluation, int], None]
"""Called with each finished evaluation and the maximum number of evaluations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bisection:
    """The names that must stay in float32, and all evaluations."""

    outcome: Outcome
    """How the search ended.

    `found`; `nothing needed`: passes in half; `not the cause`: also fails with everything in
    float32; `out of evaluations`: `kept` passes, but fewer names may suffice.
    """
    kept: tuple[str, ...]
    """Names that stay in float32, in the order of the candidates; empty if nothing helps."""
    is_minimal: bool
    """Whether a run failed without each one of them."""
    by: Literal["modules", "ops"]
    metric: str
    tolerance: float
    candidates: tuple[str, ...]
    """All candidates, modules in the order of their calls; containers come last."""
    evaluations: tuple[Evaluation, ...]
    value_without: float
    """Metric with nothing in float32."""
    value_with: float
    """Metric with `kept` in float32."""
    value_all: float | None
    """Metric with all candidates in float32; None if it was not run."""
    stays: Literal["float32", "half"] = "float32"
    """Precision of `kept`; at O3 modules stay in half instead of FP8."""

    @property
    def has_answer(self) -> bool:
        """Whether the search ended with a set, which may be empty."""
        return self.outcome in ("found", "nothing needed")

    def summary(self) -> str:
        """Return the result in one line."""
        metric = _METRIC_TEXTS.get(self.metric, self.metric)
        among, shown = f"{len(self.candidates)} {self.by}", _shown(self.kept)
        allowed = f"{self.tolerance:g} allowed"
        if self.outcome == "nothing needed":
            return f"nothing must stay in {self.stays}: {metric} {self.value_without:.3g}, {allowed}"
        if self.outcome == "not the cause":
            value = self.value_without if self.value_all is None else self.value_all
            return f"precision is not the cause: {metric} {value:.3g} with all {among} in {self.stays}, {allowed}"
        values = f"{metric} {self.value_without:.3g} without, {self.value_with:.3g} with, {allowed}"
        if self.outcome == "found":
            return f"{len(self.kept)} of {among} must stay in {self.stays}: {shown} ({values})"
        count = len(self.evaluations)
        return (
            f"{count} evaluations were not enough: {len(self.kept)} of {among} suffice, maybe fewer: {shown} ({values})"
        )

    def table(self) -> list[list[str]]:
        """Return the header and one row per evaluation."""
        metric = _METRIC_TEXTS.get(self.metric, self.metric)
        rows = [["run", f"{self.by} in {self.stays}", metric, "passed"]]
        for one in self.evaluations:
            rows.append([str(one.number), str(len(one.kept)), f"{one.value:.3g}", "yes" if one.passed else "no"])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; non-finite values become None."""
        data = asdict(self)
        for holder in (data, *data["evaluations"]):
            for key, value in holder.items():
                if isinstance(value, float) and not math.isfinite(value):
                    holder[key] = None
        return data

    def to_lists(self) -> dict[str, list[str]]:
        """Return the content of the list file: `excluded_layers`, at O3 `half_layers`, or `custom_black_list`.

        Raises:
            ValueError: No set passes.
        """
        if self.outcome == "not the cause":
            raise ValueError(f"no list helps; {self.summary()}")
        if self.by == "modules":
            key = "half_layers" if self.stays == "half" else "excluded_layers"
            return {key: [glob.escape(name) for name in self.kept]}
        return {"custom_black_list": list(self.kept)}

    def write(self, path: str | Path) -> None:
        """Write the list file for `amp.read_lists` and `mezzo train --amp-lists`, atomically.

        Raises:
            ValueError: No set passes.
            RunError: The file cannot be written.
        """
        note = f"# mezzo bisect: {' '.join(self.summary().split())}\n"
        write_text(Path(path), note + yaml.safe_dump(self.to_lists(), sort_keys=False, allow_unicode=True))


@operator_log.paused()
def bisect(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    by: str = "modules",
    metric: str = "loss",
    tolerance: float | None = None,
    level: str = "O1",
    dtype: str | torch.dtype = "float16",
    steps: int = 5,
    learning_rate: float = 0.003,
    max_evaluations: int = MAX_EVALUATIONS,
    candidates: Iterable[str] | None = None,
    fp8: amp.Fp8Recipe | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Bisection:
    """Find a minimal set of modules or operators that must stay in float32 (at O3: in half) for a run to pass.

    Each evaluation runs a copy of the model from the same start on the same batch. The model, the batch and all random
    states are unchanged. Dropout is off in the copies, because on a GPU its masks depend on the dtype. Modules stay in
    float32 by `decorate(excluded_layers=...)`, operators by `custom_black_list`.

    Args:
        model: On its device. A decorated model starts from its masters. Excluded layers stay excluded.
        inputs: A tuple of positional arguments, a dict of named ones, or the only argument of the model.
        targets: Second argument of `loss_fn`.
        loss_fn: Returns the loss of output and targets; the metric `output` needs none.
        by: `modules` or `ops`.
        metric: `loss`: largest relative difference of the losses from those of the float32 run. `finite`: number of
            steps that failed because the loss, or a gradient at any loss scale, was not finite. `output`: relative L2
            error of the output of one forward pass, in the model's own mode.
        tolerance: Largest allowed value of the metric; None: `TOLERANCES`, at O3 `FP8_TOLERANCES`.
        level: `OD`, `O1` or `O2`; `O3` finds layers whose products must stay in half, besides the first and the last.
        dtype: `float16` (with loss scaling) or `bfloat16`.
        steps: SGD steps per evaluation; a step that overflows only because of the loss scale is repeated.
        learning_rate: Of the SGD.
        max_evaluations: Maximum number of evaluations.
        candidates: Names of modules or operators, in the order of preference; None: all that ran in half, at O3 all that
            ran in FP8.
        fp8: O3: a recipe or its settings; None: the default. A device without FP8 products emulates them.
        progress: Called after each evaluation.

    Raises:
        ValueError: An argument is wrong.
    """
    settings = RunSettings(
        by=by,
        metric=metric,
        level=level,
        dtype=dtype_name(parse_half_dtype(dtype)),
        steps=steps,
        learning_rate=learning_rate,
        fp8=None if fp8 is None else amp.Fp8Recipe.of(fp8),
    )
    in_fp8 = settings.level == "O3"
    usual = FP8_TOLERANCES[metric] if in_fp8 else TOLERANCES[metric][settings.dtype]
    allowed = usual if tolerance is None else tolerance
    _check_numbers(allowed, max_evaluations)
    given = None if candidates is None else check_candidates(candidates, by, model)
    runs = Runs(model, inputs, targets, loss_fn, settings)
    if given is None:
        stats, call_order = runs.record()
        by_module = by == "modules"
        stages = module_stages(stats.rows, call_order, in_fp8=in_fp8) if by_module else operator_stages(stats.rows)
        ordered = tuple(n for stage in stages for n in (reversed(stage) if by == "modules" else sorted(stage)))
    else:
        stages, ordered = given, given[0]
    return _search(
        runs.measure, stages, ordered, by=by, metric=metric, tolerance=allowed, max_evaluations=max_evaluations,
        progress=progress, stays="half" if in_fp8 else "float32",
    )  # fmt: skip


def bisect_run(
    run: RunMetric,
    candidates: Iterable[str],
    tolerance: float,
    *,
    by: str = "modules",
    metric: str = "metric",
    max_evaluations: int = MAX_EVALUATIONS,
    progress: Progress | None = None,
) -> Bisection:
    """Find a minimal set as `bisect` does, with your own training function.

    Args:
        run: Trains with these names in float32 and returns the metric; it must be deterministic.
        candidates: Names, in the order of preference.
        tolerance: Largest allowed value of the metric.
        by: `modules` or `ops`: the kind of the names, for the list file.
        metric: Name of the metric, for the table.
        max_evaluations: Maximum number of calls of `run`.
        progress: Called after each evaluation.

    >>> bisect_run(lambda kept: 0.0 if "head" in kept else 1.0, ["stem", "body", "head"], tolerance=0.1).kept
    ('head',)
    """
    RunSettings(by=by, metric="loss", level="O1", dtype="float16", steps=1, learning_rate=1.0)
    _check_numbers(tolerance, max_evaluations)
    names = tuple(candidates)
    return _search(
        run, (names,), names, by=by, metric=metric, tolerance=tolerance, max_evaluations=max_evaluations,
        progress=progress,
    )  # fmt: skip


def _check_numbers(tolerance: float, max_evaluations: int) -> None:
    check_at_least("tolerance", tolerance, 0)
    check_at_least("max_evaluations", max_evaluations, MIN_EVALUATIONS)


def _search(
    run: RunMetric,
    stages: Stages,
    ordered: Sequence[str],
    *,
    by: str,
    metric: str,
    tolerance: float,
    max_evaluations: int,
    progress: Progress | None,
    stays: Literal["float32", "half"] = "float32",
) -> Bisection:
    """Search stage by stage; a stage adds its candidates to the earlier ones."""
    values: dict[frozenset[str], float] = {}
    evaluations: list[Evaluation] = []

    def passes(kept: frozenset[str]) -> bool:
        value = values[kept] = float(run(kept))
        in_order = tuple(name for name in ordered if name in kept)
        evaluations.append(Evaluation(len(evaluations) + 1, in_order, value, value <= tolerance))
        if progress is not None:
            progress(evaluations[-1], max_evaluations)
        return evaluations[-1].passed

    names: tuple[str, ...] = ()
    result: SearchResult | None = None
    for stage in stages:
        names += stage
        known = {kept: value <= tolerance for kept, value in values.items()}
        result = minimal_set(passes, names, max_evaluations - len(values), known=known)
        if result.outcome != "not the cause":
            break
    assert result is not None
    return Bisection(
        outcome=result.outcome,
        kept=tuple(name for name in ordered if name in result.kept),
        is_minimal=result.is_minimal,
        by="modules" if by == BY[0] else "ops",
        metric=metric,
        tolerance=tolerance,
        candidates=tuple(ordered),
        evaluations=tuple(evaluations),
        value_without=values[frozenset()],
        value_with=values[frozenset(result.kept)],
        value_all=values.get(frozenset(names)),
        stays=stays,
    )


def _shown(names: Sequence[str]) -> str:
    """Return up to `SHOWN` names for a sentence."""
    listed = [name or "the whole model" for name in names[:SHOWN]]
    return ", ".join(listed) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
