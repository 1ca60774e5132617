"""Tables of the page: stages per training, and the two tables of support that the Paddle documents have."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mezzo.tipc._run_folder import RecordedRun
from mezzo.tipc._step_views import BAD_STATUSES, SYMBOLS, StepView

_KINDS = ("prepare", "train", "quantise", "extract", "eval", "export")
_PRECISIONS = ("", "fp32", "fp16", "bf16", "int8")
_SHARED = ("prepare", "check")  # steps that all trainings of a run share

CARDS = ("single machine, single card", "single machine, many cards", "many machines")


@dataclass(frozen=True, slots=True)
class Cell:
    """Steps of one stage, with one verdict; `title` names them if the column does not."""

    steps: tuple[StepView, ...]
    title: str = ""

    @property
    def worst(self) -> StepView:
        """The step that decides: the first one with the most severe status."""
        return min(self.steps, key=lambda step: list(SYMBOLS).index(step.record.status))

    @property
    def state(self) -> str:
        """One status for all steps: the most severe one."""
        return self.worst.record.status

    @property
    def text(self) -> str:
        """The status with its symbol, and counts if there are several steps."""
        if len(self.steps) == 1:
            return f"{SYMBOLS[self.state]} {self.state}"
        counts = Counter[str](step.record.status for step in self.steps)
        return f"{SYMBOLS[self.state]} " + ", ".join(f"{counts[name]} {name}" for name in SYMBOLS if counts[name])

    @property
    def reason(self) -> str:
        """The reason; empty if all steps passed."""
        return self.worst.brief if self.state != "passed" else ""

    @property
    def notices(self) -> tuple[str, ...]:
        """The notices of all steps, each once."""
        return tuple(dict.fromkeys(notice for step in self.steps for notice in step.record.notices))


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """A training of a run, or the steps of no training; one cell per column, None if there is no such step."""

    run: RecordedRun
    group: dict[str, str]
    cells: tuple[Cell | None, ...]

    @property
    def states(self) -> list[str]:
        """The verdicts in its cells, each once; bad ones also count as failed."""
        found = dict.fromkeys(cell.state for cell in self.cells if cell)
        return [*found, *(["failed"] if found.keys() & set(BAD_STATUSES) and "failed" not in found else [])]


@dataclass(frozen=True, slots=True)
class StageMatrix:
    """The stages of runs: one row per training, one column per stage."""

    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]


def stage_matrix(runs: Sequence[tuple[RecordedRun, Sequence[StepView]]]) -> StageMatrix:
    """Return the stages of runs; inference has a column for each device and precision."""
    columns = sorted({_column(step) for _, steps in runs for step in steps})
    rows = []
    for run, steps in runs:
        groups = list(dict.fromkeys(step.group for step in steps))
        if any(groups) and all(step.group or step.record.kind in _SHARED for step in steps):
            groups = [group for group in groups if group]  # shared steps are shown in the row of each training
        for group in groups:
            own = [step for step in steps if step.group == group or (not step.group and step.record.kind in _SHARED)]
            cells = (_cell([step for step in own if _column(step) == column]) for column in columns)
            rows.append(MatrixRow(run, dict(group), tuple(cells)))
    return StageMatrix(tuple(column[-1] for column in columns), tuple(rows))


def training_support(steps: Iterable[StepView]) -> tuple[tuple[str, ...], dict[str, list[list[Cell]]]]:
    """Return the columns, and for each model the cells of each column: its trainings on one card and on several."""
    trainings = [step for step in steps if step.record.kind == "train"]
    several = any(_cards(step) == CARDS[2] for step in trainings)
    columns = CARDS if several else CARDS[:2]
    table = {}
    for model in dict.fromkeys(step.record.model for step in trainings):
        own = [step for step in trainings if step.record.model == model]
        table[model] = [_by_title([(_training(s), s) for s in own if _cards(s) == cards]) for cards in columns]
    return columns, table


def inference_support(steps: Iterable[StepView]) -> dict[str, tuple[list[list[Cell]], str]]:
    """Return for each model its cells on CPU and GPU, by precision, and the batch sizes that passed."""
    inferences = [step for step in steps if step.record.kind == "infer"]
    table = {}
    for model in dict.fromkeys(step.record.model for step in inferences):
        own = [step for step in inferences if step.record.model == model]
        cells = [_by_title([(_precision(s), s) for s in own if _device(s) == device]) for device in ("cpu", "gpu")]
        passed = {step.record.labels.get("batch", "") for step in own if step.record.status == "passed"} - {""}
        table[model] = (cells, ", ".join(sorted(passed, key=lambda batch: (len(batch), batch))))
    return table


def _column(step: StepView) -> tuple[int, str, int, str]:
    """Return a sort key of the column; its last part is the title."""
    kind, precision = step.record.kind, _precision(step)
    if kind == "infer":
        rank = _PRECISIONS.index(precision) if precision in _PRECISIONS else len(_PRECISIONS)
        return len(_KINDS), _device(step), rank, f"{_device(step).upper()} infer {precision}".strip()
    place = _KINDS.index(kind) if kind in _KINDS else len(_KINDS) + 1
    return place, "", 0, kind


def _cell(steps: Sequence[StepView], title: str = "") -> Cell | None:
    return Cell(tuple(steps), title) if steps else None


def _by_title(steps: Sequence[tuple[str, StepView]]) -> list[Cell]:
    titles = dict.fromkeys(title for title, _ in steps)
    return [Cell(tuple(step for each, step in steps if each == title), title) for title in titles]


def _training(step: StepView) -> str:
    trainer = step.record.labels.get("trainer", "")
    if step.is_mixed:
        return "mixed precision"
    return "full precision" if trainer in ("", "norm_train") else trainer


def _cards(step: StepView) -> str:
    devices, nodes = step.record.labels.get("devices", ""), step.record.labels.get("nodes", "")
    if ";" in devices or nodes not in ("", "1"):
        return CARDS[2]
    return CARDS[1] if "," in devices else CARDS[0]


def _device(step: StepView) -> str:
    return step.record.labels.get("device", "").lower()


def _precision(step: StepView) -> str:
    return step.record.labels.get("precision", "").lower()


def verdict(statuses: Iterable[str]) -> str:
    """Return one verdict for many statuses.

    >>> verdict(["passed", "skipped"]), verdict(["timeout"]), verdict([])
    ('passed', 'failed', 'empty')
    """
    seen = set(statuses)
    return "failed" if seen & set(BAD_STATUSES) else "passed" if "passed" in seen else "skipped" if seen else "empty"
