"""The generic step: any optimizer's own rule, applied to the masters in place of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim._grads import Slot, gather, needs_grad_dtype, true_grad
from mezzo.optim._masters import float32_like, master_of, publish, stored_master

_UNSET: Any = object()


Masters = dict[Tensor, Tensor]
"""The masters of half parameters, by parameter."""


def masters_in(optimizer: Optimizer) -> Masters:
    """Return the masters of an optimizer's parameters.

    Compact ones as new float32 tensors, to publish later.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {param: master for param in params if (master := master_of(param)) is not None}


def placeholder_masters(optimizer: Optimizer) -> Masters:
    """Return tensors like the masters, for code that ignores their values."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {param: float32_like(kept) for param in params if (kept := stored_master(param)) is not None}


@contextmanager
def masters_as_params(optimizer: Optimizer, masters: Masters) -> Iterator[None]:
    """Return a context in which `param_groups` and `state` hold the masters."""
    _rename(optimizer, {id(p): m for p, m in masters.items()})
    for param, master in masters.items():
        master.requires_grad_(param.requires_grad)
    try:
        yield
    finally:
        for master in masters.values():
            master.requires_grad_(False)
        _rename(optimizer, {id(m): p for p, m in masters.items()})


def _rename(optimizer: Optimizer, to: dict[int, Tensor]) -> None:
    """Replace parameters in place: LBFGS and others hold references to the lists and dicts."""
    if not to:
        return
    for group in optimizer.param_groups:
        group["params"][:] = [to.get(id(p), p) for p in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, value in entries:
        optimizer.state[to.get(id(key), key)] = value


@contextmanager
def true_gradients(slots: list[Slot], masters: Masters, factor: Tensor | None) -> Iterator[None]:
    """Return a context in which masters and other parameters have unscaled gradients."""
    saved: list[tuple[Tensor, Tensor, Any]] = []
    try:
        for slot in slots:
            grad = true_grad(slot, factor, slot.kind[1])
            if slot.has_master:
                masters[slot.param].grad = grad
            elif grad is not slot.param.grad:
                saved.append((slot.param, *_lend(slot.param, grad)))
        yield
    finally:
        for master in masters.values():
            master.grad = None
        for param, grad, grad_dtype in saved:
            param.grad = None
            if grad_dtype is not _UNSET:
                param.grad_dtype = grad_dtype
            param.grad = grad


def _lend(param: Tensor, grad: Tensor) -> tuple[Tensor, Any]:
    """Put another gradient into a parameter.

    Return the old one and the old `grad_dtype` if that had to change.
    """
    old = param.grad
    assert old is not None
    param.grad = None
    grad_dtype = _UNSET
    if needs_grad_dtype(param, grad.dtype):
        grad_dtype = param.grad_dtype
        param.grad_dtype = None
    param.grad = grad
    return old, grad_dtype


def step_on_masters(
    optimizer: Optimizer, own_step: Callable[..., Any], slots: list[Slot], factor: Tensor | None
) -> Any:
    """Run the optimizer's own step on the masters and write the result into the half parameters.

    If the step raises, masters that it updated are written too, so that both agree. A stock
    optimizer that raises leaves its parameters half updated as well; a copy to roll back to would
    cost the memory of all masters.
    """
    masters = masters_in(optimizer)
    try:
        with masters_as_params(optimizer, masters), true_gradients(slots, masters, factor):
            return own_step()
    finally:
        _publish(masters)


def step_with_closure(optimizer: Optimizer, own_step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """Run a step that evaluates a closure, once or (LBFGS) often.

    Before each evaluation the masters are written into the half parameters, and the optimizer gets
    its parameters back, so that `zero_grad` in the closure reaches their gradients.
    """
    swap = _ClosureSwap(optimizer)

    def evaluate() -> Any:
        swap.leave()
        with torch.enable_grad():
            loss = closure()
        swap.enter()
        return loss

    swap.enter()
    try:
        return own_step(evaluate)
    finally:
        swap.leave()


class _ClosureSwap:
    """Enters and leaves the two contexts above several times."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._open: list[Any] = []
        self._masters: Masters = {}

    def enter(self) -> None:
        slots = [slot for group in gather(self._optimizer) for slot in group]
        masters = self._masters = masters_in(self._optimizer)
        for context in (masters_as_params(self._optimizer, masters), true_gradients(slots, masters, None)):
            context.__enter__()
            self._open.append(context)

    def leave(self) -> None:
        if not self._open:
            return
        while self._open:
            self._open.pop().__exit__(None, None, None)
        _publish(self._masters)


def _publish(masters: Masters) -> None:
    # All, not only those with gradients: a user's own rule may change the others too.
    publish(list(masters), list(masters.values()))
