"""Tables over steps: the matrix of a run's stages, and the two tables of support that the documents have."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mezzo.tipc._run_folder import RecordedRun
from mezzo.tipc._step_views import BAD, SYMBOLS, StepView

_KINDS = ("prepare", "train", "quantise", "extract", "eval", "export")
_PRECISIONS = ("", "fp32", "fp16", "bf16", "int8")
_SHARED = ("prepare", "check")  # one step for all trainings of a run

CARDS = ("single machine, single card", "single machine, many cards", "many machines")


@dataclass(frozen=True, slots=True)
class Cell:
    """Steps of one stage, with one verdict; `title` tells what they are where the column does not."""

    steps: tuple[StepView, ...]
    title: str = ""

    @property
    def worst(self) -> StepView:
        """The step that decides: the first one of the gravest status."""
        return min(self.steps, key=lambda step: list(SYMBOLS).index(step.record.status))

    @property
    def state(self) -> str:
        """One status for all: the gravest; skipped only if all are."""
        return self.worst.record.status

    @property
    def text(self) -> str:
        """The status with its symbol; counts where there is more than one step."""
        if len(self.steps) == 1:
            return f"{SYMBOLS[self.state]} {self.state}"
        counts = Counter[str](step.record.status for step in self.steps)
        return f"{SYMBOLS[self.state]} " + ", ".join(f"{counts[name]} {name}" for name in SYMBOLS if counts[name])

    @property
    def reason(self) -> str:
        """Why it is not passed."""
        return self.worst.brief if self.state != "passed" else ""

    @property
    def notices(self) -> tuple[str, ...]:
        """What was changed for any of the steps, each once."""
        return tuple(dict.fromkeys(notice for step in self.steps for notice in step.record.notices))


@dataclass(frozen=True, slots=True)
class Row:
    """A training of a run, or what belongs to none; a cell a column, empty where there is no such step."""

    run: RecordedRun
    group: dict[str, str]
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Stages of runs."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def stage_matrix(runs: Sequence[tuple[RecordedRun, Sequence[StepView]]]) -> Matrix:
    """Return the matrix: a row a training, a column a stage; inference has a column for each device and precision."""
    columns = sorted({_column(step) for _, steps in runs for step in steps})
    rows = []
    for run, steps in runs:
        groups = list(dict.fromkeys(step.group for step in steps))
        if any(groups) and all(step.group or step.record.kind in _SHARED for step in steps):
            groups = [group for group in groups if group]  # what belongs to no training stands with each of them
        for group in groups:
            own = [step for step in steps if step.group == group or (not step.group and step.record.kind in _SHARED)]
            cells = (_cell([step for step in own if _column(step) == column]) for column in columns)
            rows.append(Row(run, dict(group), tuple(cells)))
    return Matrix(tuple(column[-1] for column in columns), tuple(rows))


def training_support(steps: Iterable[StepView]) -> tuple[tuple[str, ...], dict[str, list[list[Cell]]]]:
    """Return columns, and for each model its cells a column: what it was trained with on one card and on many."""
    trainings = [step for step in steps if step.record.kind == "train"]
    several = any(_cards(step) == CARDS[2] for step in trainings)
    columns = CARDS if several else CARDS[:2]
    table = {}
    for model in dict.fromkeys(step.record.model for step in trainings):
        own = [step for step in trainings if step.record.model == model]
        table[model] = [_by_title([(_training(s), s) for s in own if _cards(s) == cards]) for cards in columns]
    return columns, table


def inference_support(steps: Iterable[StepView]) -> dict[str, tuple[list[list[Cell]], str]]:
    """Return for each model its cells on CPU and on GPU, by precision, and the batch sizes that passed."""
    inferences = [step for step in steps if step.record.kind == "infer"]
    table = {}
    for model in dict.fromkeys(step.record.model for step in inferences):
        own = [step for step in inferences if step.record.model == model]
        cells = [_by_title([(_precision(s), s) for s in own if _device(s) == device]) for device in ("cpu", "gpu")]
        passed = {step.record.labels.get("batch", "") for step in own if step.record.status == "passed"} - {""}
        table[model] = (cells, ", ".join(sorted(passed, key=lambda batch: (len(batch), batch))))
    return table


def _column(step: StepView) -> tuple[int, str, int, str]:
    """Return a key that sorts the columns, its last part the title."""
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
    """Return one word for many statuses.

    >>> verdict(["passed", "skipped"]), verdict(["timeout"]), verdict([])
    ('passed', 'failed', 'empty')
    """
    seen = set(statuses)
    return "failed" if seen & set(BAD) else "passed" if "passed" in seen else "skipped" if seen else "empty"
