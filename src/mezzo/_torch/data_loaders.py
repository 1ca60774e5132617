"""The workers of a `DataLoader` that keeps them: whether they run, and their end.

Why: workers are forked before other threads start, and ended before the interpreter goes down. The public class starts
them at the first batch and ends them when it is collected.
Releases: 2.11 to 2.15.
Without it: forked workers can hang (CPython gh-112275), and runs end with warnings about leaked processes.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def has_workers(loader: DataLoader[Any]) -> bool:
    """Whether the workers of a loader with `persistent_workers` run."""
    return loader._iterator is not None


def end_workers(loader: DataLoader[Any]) -> None:
    """End the workers of a loader, if they run; the next iteration starts new ones."""
    iterator: Any = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None
