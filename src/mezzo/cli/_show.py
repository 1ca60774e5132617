"""The progress display of commands, and the printing of a benchmark."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from mezzo.files import plain, say
from mezzo.report import markdown_table

ReportProgress = Callable[[str, int, int], None]
"""Called with the name of the work, the finished steps and the total steps."""


@contextmanager
def progress_bar() -> Iterator[ReportProgress]:
    """Yield a function to call after each step. It draws a bar on a terminal, otherwise prints a line when all are done."""
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


def print_bench(result: Any, title: str, as_json: bool) -> None:
    """Print a benchmark as JSON, or as its table and that of the machine."""
    if as_json:
        say(json.dumps(result.to_dict(), indent=2))
        return
    machine = result.machine
    versions = f"torch {machine.torch_version}, driver {machine.driver_version}"
    tables = [markdown_table(rows) for rows in result.tables()]
    say("\n\n".join([title, *tables, f"{markdown_table(machine.table())}\n{versions}"]))
