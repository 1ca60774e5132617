"""The switch between mezzo's operators and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_only_torch = False


@contextmanager
def torch_operators_only() -> Iterator[None]:
    """Inside, networks and losses compute with torch's own operators only: the stock side of a benchmark.

    The switch holds for the whole process. It decides in the forward pass; gradients follow it.
    """
    global _only_torch
    before, _only_torch = _only_torch, True
    try:
        yield
    finally:
        _only_torch = before


def uses_own_operators() -> bool:
    """Whether functions with an operator of mezzo's may call it."""
    return not _only_torch
