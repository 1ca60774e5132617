"""What a user sees during a run: a live table on a terminal, lines in a pipe, or JSON lines."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mezzo.files import FileError, one_line, open_regular, plain, say
from mezzo.tipc._logs import NOTICE
from mezzo.tipc._plan import PlanStep
from mezzo.tipc._record import Record

_MARKS = {"passed": "ok", "failed": "FAILED", "timeout": "TIMEOUT", "skipped": "skipped", "interrupted": "interrupted"}
_STYLES = {"passed": "green", "failed": "bold red", "timeout": "bold red", "skipped": "yellow", "interrupted": "yellow"}
_TAIL = 3
_FAILED_TAIL = 12


class RunListener(Protocol):
    """Receives the events of a run."""

    def started(self, step: PlanStep, log: Path) -> None:
        """Show that a step has started."""

    def ended(self, record: Record) -> None:
        """Show that a step has ended or was skipped."""

    def say(self, line: str) -> None:
        """Show any other line."""


def describe_step(step: PlanStep) -> str:
    """Return a step in a few words.

    >>> describe_step(PlanStep("infer-2", "infer", "x", labels={"device": "cpu", "batch": "1"}))
    'infer-2 device cpu, batch 1'
    """
    names = ("devices", "trainer", "device", "precision", "batch", "threads", "trt")
    parts = [f"{name} {step.labels[name]}" for name in names if step.labels.get(name)]
    return f"{step.name} {', '.join(parts)}".rstrip()


def describe_record(record: Record) -> str:
    """Return a record in one line."""
    parts = [f"{_MARKS[record.status]:>8}  {record.step}"]
    if record.start:
        parts.append(f"{record.seconds:.1f} s")
    if record.resumed:
        parts.append("from an earlier run")
    if record.reason:
        parts.append(f"({record.reason})")
    if record.status in ("failed", "timeout") and record.log:
        parts.append(f"log: {record.log}")
    return "  ".join(parts)


def describe_failure(record: Record) -> list[str]:
    """Return the command and the end of the log of a failed step; empty for other steps."""
    if record.status not in ("failed", "timeout") or not record.log:
        return []
    log = Path(record.cwd, record.log)
    tail = [line for line in last_lines(log, 2 * _FAILED_TAIL) if not line.startswith(NOTICE)][-_FAILED_TAIL:]
    return [f"          $ {plain(record.command.strip())}", *(f"          | {line}" for line in tail)]


class LineProgress:
    """Prints a line when a step starts and one when it ends."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or say

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def started(self, step: PlanStep, log: Path) -> None:
        """Print a line."""
        self.write(f"   start  {describe_step(step)}")

    def ended(self, record: Record) -> None:
        """Print how it ended, and its notices."""
        self.write(describe_record(record))
        for notice in record.notices if record.start else ():
            self.write(f"          {plain(notice)}")
        for line in describe_failure(record):
            self.write(line)

    def say(self, line: str) -> None:
        """Print a line."""
        self.write(line)


class JsonProgress(LineProgress):
    """Prints one JSON line per step on standard output, and everything else on standard error."""

    def started(self, step: PlanStep, log: Path) -> None:
        """Print nothing."""

    def ended(self, record: Record) -> None:
        """Print the record."""
        self.write(record.line())

    def say(self, line: str) -> None:
        """Print a line on standard error."""
        say(line, err=True)


class TableProgress(LineProgress):
    """Draws a table twice a second, with the last lines of the running steps' logs."""

    def __init__(self, console: Console, steps: tuple[PlanStep, ...]) -> None:
        self.console = console
        self.rows = {step.name: (describe_step(step), "waiting", "") for step in steps}
        self.running: dict[str, tuple[float, Path]] = {}
        self.live = Live(console=console, refresh_per_second=2, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def started(self, step: PlanStep, log: Path) -> None:
        """Mark a step as running."""
        self.running[step.name] = (time.monotonic(), log)

    def ended(self, record: Record) -> None:
        """Mark it as ended."""
        self.running.pop(record.step, None)
        name = self.rows.get(record.step, (record.step, "", ""))[0]
        took = f"{record.seconds:.1f} s" if record.start else ""
        self.rows[record.step] = (name, record.status, "  ".join(part for part in (took, record.reason) if part))
        for line in describe_failure(record):
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.console.print(Text(plain(line)))

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("step", "state", "time"):
            table.add_column(title)
        running = dict(self.running)
        for name, (words, state, more) in self.rows.items():
            if name in running:
                state, more = "running", f"{time.monotonic() - running[name][0]:.0f} s"
            mark = Text(_MARKS.get(state, state), _STYLES.get(state, "cyan"))
            table.add_row(Text(one_line(words)), mark, Text(one_line(more)))
        tails = [Text(f"  {line}", "dim") for _, log in running.values() for line in last_lines(log, _TAIL)]
        return Group(table, *tails)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that is being written."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            text = file.read(4000).decode("utf-8", "replace")
    except (FileError, OSError):
        return []
    shown = ["".join(char for char in line if char.isprintable()) for line in text.splitlines()]
    return [line for line in shown if line.strip()][-count:]


def progress_for(steps: tuple[PlanStep, ...], as_json: bool) -> LineProgress:
    """Return the progress that fits the output: a terminal, a pipe, or JSON."""
    if as_json:
        return JsonProgress()
    console = Console()
    return TableProgress(console, steps) if console.is_terminal else LineProgress()
