"""What all launches of this package share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_HOST_PROGRAMS = 3
"""Programs that share a loop in Triton's interpreter: few, but more than one."""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches on a device, which need not be the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Return how many programs share a loop: two for each multiprocessor."""
    if device.type != "cuda":
        return _HOST_PROGRAMS
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def differentiable_gradients(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `function(*tensors)` as torch computes them, for a second derivative.

    A backward with `create_graph=True` needs gradients that have gradients. Kernels have none. One
    of the tensors may have been computed from another, as a weight from the data. A view of each
    keeps that path out of the gradients: autograd follows it itself.
    """
    with torch.enable_grad():
        views = [
            tensor.view_as(tensor) if tensor is not None and tensor.requires_grad else tensor for tensor in tensors
        ]
        result = function(*views)
    wanted = [view for view in views if view is not None and view.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True))
    return tuple(next(found) if view is not None and view.requires_grad else None for view in views)
