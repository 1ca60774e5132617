"""The rows of a history: runs and steps, as they are read, and the filter that chooses among them."""

from dataclasses import dataclass, fields

from mezzo.errors import MezzoError
from mezzo.files import parse_json, short_repr


class HistoryError(MezzoError):
    """A history that cannot be used."""


@dataclass(frozen=True, slots=True)
class HistoryRun:
    """A run in a history, or one that is about to be added; the fields are columns of `runs`."""

    id: int
    """0: not in the history."""
    key: str
    """The same for two copies of one run."""
    network: str
    mode: str
    config: str
    """Name of the TIPC text, without folder and suffix."""
    profile: str
    folder: str
    started: str
    """ISO 8601 in UTC."""
    ended: str
    result: int | None
    """Exit status; None if the runner did not end."""
    verdict: str
    machine: str
    """What speeds depend on: GPUs, or processor and cores. Only runs of one machine are compared by speed."""
    gpu: str
    driver: str
    mezzo: str
    torch: str
    commit_id: str
    """Of the repository that was certified; empty if it is none."""
    code: str
    """Hash of its source files."""
    versions: str
    """All versions, as JSON."""


@dataclass(frozen=True, slots=True)
class Series:
    """The same step in run after run; the fields are columns of `series`."""

    network: str
    mode: str
    config: str
    kind: str
    """Kind of the step, or `certificate` for a check of a certificate."""
    labels: str
    """What makes it different from other steps of its kind, as JSON with sorted names."""
    place: int
    """0, or a count where all else is equal."""
    device: str
    """cpu or gpu; empty if a step has none."""
    precision: str


@dataclass(frozen=True, slots=True)
class HistoryStep:
    """What a step did in one run."""

    series: Series
    step: str
    """Its name in the plan of that run: `infer-2`."""
    status: str
    reason: str
    resumed: bool
    """Taken from an earlier run: it is no measurement."""
    seconds: float
    latency_ms: float | None
    throughput: float | None
    """Samples per second."""
    accuracy: float | None
    accuracy_name: str
    busy: str = ""
    """Why its speed means nothing; empty if it does."""
    host: str = ""
    """The node of a cluster that ran it; empty: the runner's own machine."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which steps to show; None: all."""

    network: str | None = None
    step: str | None = None
    """A name (`infer-2`) or a kind (`infer`)."""
    device: str | None = None
    """cpu, gpu, or a part of a GPU's name."""
    precision: str | None = None

    def where(self) -> tuple[str, list[str]]:
        """Return the condition in SQL over `runs`, `series` and `steps`, and its values."""
        conditions, values = ["1"], []
        for column, value in (("series.network", self.network), ("series.precision", self.precision)):
            if value is not None:
                conditions.append(f"{column} = ? COLLATE NOCASE")
                values.append(value)
        if self.step is not None:
            conditions.append("(steps.step = ? OR series.kind = ?)")
            values += [self.step, self.step]
        if self.device is not None:
            conditions.append(
                "(series.device = ? COLLATE NOCASE OR (series.device = 'gpu' AND instr(lower(runs.gpu), ?)))"
            )
            values += [self.device, self.device.lower()]
        # An argument that is not UTF-8 chooses nothing; SQLite would refuse it.
        return " AND ".join(conditions), [value.encode(errors="replace").decode() for value in values]


def parse_words(text: str) -> dict[str, str]:
    """Return the object of texts in a column with JSON; raises HistoryError for anything else."""
    try:
        values = parse_json(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise HistoryError(
            f"the history is damaged: a row holds {short_repr(text)} in place of an object of texts; move the file away, or "
            "restore a copy"
        )
    return values


RUN_COLUMNS = tuple(each.name for each in fields(HistoryRun))
SERIES_COLUMNS = tuple(each.name for each in fields(Series))
STEP_COLUMNS = tuple(each.name for each in fields(HistoryStep))[1:]
