"""The workers of a `DataLoader` that keeps them: whether they run, and their end.

Why: workers are forked before other threads start, and ended before the interpreter goes down. The
public class starts them at the first batch and ends them when it is collected.
Releases: 2.11 to 2.15.
Without it: forked workers can hang (CPython gh-112275), and runs end with warnings about leaked
processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from mezzo.errors import RunError

#: Of torch's error: the number of the process, then its end.
_DEATH = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) (is killed by signal: [^.]*|exited unexpectedly[^.]*)"
)


def has_workers(loader: DataLoader[Any]) -> bool:
    """Whether the workers of a loader with `persistent_workers` run."""
    return loader._iterator is not None


def end_workers(loader: DataLoader[Any]) -> None:
    """End the workers of a loader, if they run; the next iteration starts new ones."""
    iterator: Any = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


@contextmanager
def translate_worker_errors() -> Iterator[None]:
    """Turn the error of a dead worker into a one-line RunError.

    Torch raises it at any point of the training process.
    """
    try:
        yield
    except RuntimeError as error:
        death = _DEATH.search(str(error))
        if death is None:
            raise
        raise RunError(
            f"a process that reads data (pid {death[1]}) {death[2]}: often the memory was used up; use fewer --workers, and "
            "go on from the last checkpoint with --resume auto"
        ) from error
