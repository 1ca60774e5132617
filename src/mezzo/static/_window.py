"""Gradient accumulation in compiled steps: several calls add up, and the last of them updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class AccumulationWindow:
    """The calls between two updates.

    CUDA graphs of several shapes must add to the same memory, so captured steps keep the gradients
    in buffers. An uncaptured step needs none: autograd adds to `param.grad`.

    Args:
        size: How many calls make one update.
        optimizer: Its parameters have the buffers.
    """

    def __init__(self, size: int, optimizer: Optimizer) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"accumulate={size!r}: must be a whole number of at least 1, the calls for one update")
        self.size, self.pending = size, 0
        self._optimizer = optimizer
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of calls: those that only add (False), and those that update (True)."""
        return (True,) if self.size == 1 else (False, True)

    @property
    def updates_next(self) -> bool:
        """Whether the next call updates the weights."""
        return self.pending + 1 == self.size

    def note_call(self) -> None:
        """Count a call."""
        self.pending = (self.pending + 1) % self.size

    def drop(self) -> None:
        """Start anew: drop the gradients since the last update."""
        self._optimizer.zero_grad(set_to_none=True)
        self.pending = 0

    # Captured steps

    def make_buffers(self) -> None:
        """Make buffers for the gradients that are there now; they start as zeros.

        A parameter without a gradient gets no buffer: weight decay must not move it. Later shapes
        use the same buffers.
        """
        if not self._buffers:
            params = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._buffers = [(param, torch.zeros_like(param.grad)) for param in params]
        for param, buffer in self._buffers:
            param.grad = buffer.zero_()

    def use_buffers(self) -> None:
        """Put the buffers back; where somebody removed a gradient, it is zero."""
        for param, buffer in self._buffers:
            if param.grad is not buffer:
                param.grad = buffer.zero_() if param.grad is None else buffer.copy_(param.grad)

    def clear(self) -> None:
        """Drop the gradients after an update; buffers become zero."""
        self._optimizer.zero_grad(set_to_none=not self._buffers)

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Inside, a step may be tried and captured; afterwards the gradients are as before."""
        if self.pending:
            self.use_buffers()
        before = [buffer.clone() for _, buffer in self._buffers] if self.pending else []
        try:
            yield
        finally:
            if before:
                for (param, buffer), value in zip(self._buffers, before, strict=True):
                    param.grad = buffer.copy_(value)
