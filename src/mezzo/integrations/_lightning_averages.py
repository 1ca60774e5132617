"""Lightning's callbacks that average weights: they read and write float32 masters instead of half weights.

The stock callbacks write by `param.data.copy_`, which a master cannot notice, and round the average at each validation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mezzo.amp import master_parameters
from mezzo.optim import has_master, master_of, publish

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _SwapsMasters(_Base):  # type: ignore[misc]
    """For `WeightAveraging`, which evaluates with the average and ends with it."""

    _average_model: Any

    @torch.no_grad()
    def _swap_models(self, pl_module: nn.Module) -> None:
        for average, current in self._pairs(pl_module):
            value = average.clone()
            master = master_of(current)
            average.copy_(current if master is None else master)
            _write(current, value)

    def _copy_average_to_current(self, pl_module: nn.Module) -> None:
        for average, current in self._pairs(pl_module):
            _write(current, average)

    def _pairs(self, pl_module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(_tensors(self._average_model.module), _tensors(pl_module), strict=True)


class _AveragesMasters(_Base):  # type: ignore[misc]
    """For `StochasticWeightAveraging`."""

    def update_parameters(self, average_model: nn.Module, model: nn.Module, *args: Any) -> None:
        masters = SimpleNamespace(parameters=lambda: master_parameters(model))
        super().update_parameters(average_model.float(), masters, *args)

    def transfer_weights(self, src_pl_module: nn.Module, dst_pl_module: nn.Module) -> None:
        for source, target in zip(src_pl_module.parameters(), dst_pl_module.parameters(), strict=True):
            _write(target, source)


def average_masters(callbacks_of_lightning: Any, callbacks: Iterable[Any]) -> None:
    """Let the averaging callbacks of a Trainer use masters, in place."""
    for name, own in (("WeightAveraging", _SwapsMasters), ("StochasticWeightAveraging", _AveragesMasters)):
        stock: Any = getattr(callbacks_of_lightning, name, None)  # WeightAveraging is new in Lightning 2.6
        for callback in callbacks if stock is not None else ():
            if isinstance(callback, stock) and not isinstance(callback, own):
                kind: Any = type(callback)
                callback.__class__ = _combined(own, kind)


@functools.cache
def _combined(own: type, kind: type) -> type:
    """Return a class with the name of the callback's own one, under which Lightning saves its state."""
    return type(kind.__name__, (own, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, and into its master."""
    if has_master(tensor):
        publish([tensor], [value.to(tensor.device)])
    else:
        tensor.copy_(value)
