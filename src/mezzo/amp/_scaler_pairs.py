"""What `GradScaler.minimize` returns: pairs of parameters and gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ParamsAndGrads(Sequence[tuple[Tensor, Tensor]]):
    """Parameters with their gradients, collected at the first access.

    Most callers never look, and it takes time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @functools.cached_property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(p, p.grad) for p in params if p.grad is not None]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        return self._pairs[index]

    def __eq__(self, other: object) -> bool:
        return self._pairs == (other._pairs if isinstance(other, ParamsAndGrads) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._pairs)
