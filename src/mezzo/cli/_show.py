"""What commands show while they work and when they are done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from mezzo.files import plain, say

ReportProgress = Callable[[str, int, int], None]
"""Told what is being done, the steps done in it and the steps it has."""


@contextmanager
def progress_bar() -> Iterator[ReportProgress]:
    """Yield what to call after each step: a bar on a terminal, else a line a mode; stdout is for the result."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda mode, done, total: say(f"{mode}: {total} steps done", err=True) if done == total else None
        return
    with Progress(console=console, transient=True) as bar:
        tasks = {}

        def report(mode: str, done: int, total: int) -> None:
            if mode not in tasks:
                tasks[mode] = bar.add_task(escape(plain(mode)), total=total)
            bar.update(tasks[mode], completed=done)

        yield report
