"""Averages of weights (SWA, EMA): computed from the float32 masters, and kept in float32.

One update of an average is too small for a half weight: 0.001 of a difference that is small itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mezzo._torch.averages import wrap_averages
from mezzo.amp._decorated import decoration_of, forget_decoration
from mezzo.optim import master_of


def master_parameters(model: nn.Module) -> list[Tensor]:
    """Return the float32 values of a model's parameters, in the order of `model.parameters()`: masters, if it has them.

    A hand-written average must use these, not `model.parameters()`. Do not write to them: compact masters are computed
    at each call.

    >>> average = [value.clone() for value in master_parameters(nn.Linear(2, 2))]
    """
    return list(_float32(model.parameters()))


def _float32(tensors: Iterator[Any]) -> Iterator[Tensor]:
    for tensor in tensors:
        master = master_of(tensor)
        yield (tensor.detach() if master is None else master).to(torch.promote_types(tensor.dtype, torch.float32))


class _Masters:
    """Passed in place of a model: the same tensors, in float32 if they have masters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        return _float32(self._model.parameters())

    def buffers(self) -> Iterator[Tensor]:
        return _float32(self._model.buffers())


@functools.cache
def average_masters() -> None:
    """Make torch's `AveragedModel` average masters and keep averages of a decorated model in float32; once per process."""
    wrap_averages(_in_float32, _from_masters)


def _in_float32(create: Callable[..., None]) -> Callable[..., None]:
    def create_in_float32(average: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        create(average, model, *args, **kwargs)
        if any(decoration_of(module) is not None for module in average.module.modules()):
            average.module.float()
            forget_decoration(average.module)

    return create_in_float32


def _from_masters(update: Callable[..., None]) -> Callable[..., None]:
    def update_from_masters(average: AveragedModel, model: nn.Module) -> None:
        update(average, _Masters(model))

    return update_from_masters
