"""What a user sees while a run goes on: a table that changes on a terminal, lines in a pipe."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mezzo.files import FileError, open_regular, plain, say
from mezzo.files import one_line as in_one_line
from mezzo.tipc._log_text import NOTICE
from mezzo.tipc._plan import Step
from mezzo.tipc._record import Record

_MARKS = {"passed": "ok", "failed": "FAILED", "timeout": "TIMEOUT", "skipped": "skipped", "interrupted": "interrupted"}
_STYLES = {"passed": "green", "failed": "bold red", "timeout": "bold red", "skipped": "yellow", "interrupted": "yellow"}
_TAIL = 3
_FAILED_TAIL = 12


class View(Protocol):
    """What a run tells about itself."""

    def started(self, step: Step, log: Path) -> None:
        """A step has begun."""

    def ended(self, record: Record) -> None:
        """A step has ended, or was skipped."""

    def say(self, line: str) -> None:
        """Anything else."""


def described(step: Step) -> str:
    """Return a step in a few words.

    >>> described(Step("infer-2", "infer", "x", labels={"devices": "0", "device": "cpu", "precision": "fp32", "batch": "1"}))
    'infer-2 devices 0, device cpu, precision fp32, batch 1'
    """
    names = ("devices", "trainer", "device", "precision", "batch", "threads", "trt")
    parts = [f"{name} {step.labels[name]}" for name in names if step.labels.get(name)]
    return f"{step.name} {', '.join(parts)}".rstrip()


def one_line(record: Record) -> str:
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


def failure(record: Record) -> list[str]:
    """Return the command and the end of the log of a step that failed; nothing for others."""
    if record.status not in ("failed", "timeout") or not record.log:
        return []
    log = Path(record.cwd, record.log)
    tail = [line for line in last_lines(log, 2 * _FAILED_TAIL) if not line.startswith(NOTICE)][-_FAILED_TAIL:]
    return [f"          $ {plain(record.command.strip())}", *(f"          | {line}" for line in tail)]


class Lines:
    """A line when a step begins and one when it ends."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self.write = write or say

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def started(self, step: Step, log: Path) -> None:
        """Say that a step has begun."""
        self.write(f"   start  {described(step)}")

    def ended(self, record: Record) -> None:
        """Say how it ended, and what was changed."""
        self.write(one_line(record))
        for notice in record.notices if record.start else ():
            self.write(f"          {plain(notice)}")
        for line in failure(record):
            self.write(line)

    def say(self, line: str) -> None:
        """Say a line."""
        self.write(line)


class Records(Lines):
    """JSON lines on standard output, everything else beside it."""

    def started(self, step: Step, log: Path) -> None:
        """Say nothing."""

    def ended(self, record: Record) -> None:
        """Print the record."""
        self.write(record.line())

    def say(self, line: str) -> None:
        """Say a line on the error output."""
        say(line, err=True)


class Board(Lines):
    """A table that is drawn anew twice a second, with the last lines of what is running."""

    def __init__(self, console: Console, steps: tuple[Step, ...]) -> None:
        self.console = console
        self.rows = {step.name: (described(step), "waiting", "") for step in steps}
        self.running: dict[str, tuple[float, Path]] = {}
        self.live = Live(console=console, refresh_per_second=2, get_renderable=self._drawn)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def started(self, step: Step, log: Path) -> None:
        """Mark a step as running."""
        self.running[step.name] = (time.monotonic(), log)

    def ended(self, record: Record) -> None:
        """Mark it as ended."""
        self.running.pop(record.step, None)
        name = self.rows.get(record.step, (record.step, "", ""))[0]
        took = f"{record.seconds:.1f} s" if record.start else ""
        self.rows[record.step] = (name, record.status, "  ".join(part for part in (took, record.reason) if part))
        for line in failure(record):
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self.console.print(Text(plain(line)))

    def _drawn(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("step", "state", "time"):
            table.add_column(title)
        running = dict(self.running)
        for name, (words, state, more) in self.rows.items():
            if name in running:
                state, more = "running", f"{time.monotonic() - running[name][0]:.0f} s"
            mark = Text(_MARKS.get(state, state), _STYLES.get(state, "cyan"))
            table.add_row(Text(in_one_line(words)), mark, Text(in_one_line(more)))
        tails = [Text(f"  {line}", "dim") for _, log in running.values() for line in last_lines(log, _TAIL)]
        return Group(table, *tails)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that is being written; none if there is nothing yet."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            text = file.read(4000).decode("utf-8", "replace")
    except (FileError, OSError):
        return []
    shown = ["".join(char for char in line if char.isprintable()) for line in text.splitlines()]
    return [line for line in shown if line.strip()][-count:]


def view_for(steps: tuple[Step, ...], as_json: bool) -> Lines:
    """Return what fits where the output goes."""
    if as_json:
        return Records()
    console = Console()
    return Board(console, steps) if console.is_terminal else Lines()
