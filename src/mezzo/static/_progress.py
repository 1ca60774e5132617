"""What the user sees while a step is compiled, which takes seconds to minutes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mezzo.files import say

FIRST_LINE_S = 5.0
"""Without a terminal, shorter builds show nothing."""
NEXT_LINE_S = 60.0


@contextmanager
def build_shown(what: str | None) -> Iterator[None]:
    """Show on standard error that a step is built, with the seconds so far.

    On a terminal this is a line that moves and then disappears. Elsewhere, and while another bar
    is on the terminal, these are lines: after five seconds, then every minute, and at the end.
    Of several processes only the first one shows something.

    Args:
        what: What happens, such as "compiling the training step"; None: nothing that takes long.
    """
    if what is None or not _is_first_process():
        yield
    elif sys.stderr.isatty() and not _is_below_a_bar():
        with _spinner(what):
            yield
    else:
        with _lines(what):
            yield


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _is_below_a_bar() -> bool:
    """Whether a bar of rich has the terminal: a second one would destroy it, while lines appear above it."""
    proxies = sys.modules.get("rich.file_proxy")
    return proxies is not None and isinstance(sys.stderr, proxies.FileProxy)


@contextmanager
def _spinner(what: str) -> Iterator[None]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def _lines(what: str) -> Iterator[None]:
    start = time.monotonic()
    is_over = threading.Event()
    shown = threading.Event()

    def report() -> None:
        wait = FIRST_LINE_S
        while not is_over.wait(wait):
            shown.set()
            say(f"{what}: {time.monotonic() - start:.0f} s so far", err=True)
            wait = NEXT_LINE_S

    thread = threading.Thread(target=report, name="mezzo-build-shown", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        is_over.set()
        thread.join()
        raise  # the error says what happened
    is_over.set()
    thread.join()
    if shown.is_set():
        say(f"{what}: done in {time.monotonic() - start:.0f} s", err=True)
