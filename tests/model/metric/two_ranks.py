"""Two processes of a test, connected by a file."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_two_ranks(one_rank: Callable[..., None], folder: Path) -> list[Any]:
    """Call `one_rank(rank, store, results)` in two processes; return what they put into `results`."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [context.Process(target=one_rank, args=(rank, str(folder / "store"), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    return [results.get() for _ in ranks]
