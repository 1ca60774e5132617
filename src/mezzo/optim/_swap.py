"""The generic step: any optimizer's own rule, run on the masters as if they were its parameters."""

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
    """Return the masters of an optimizer's parameters; compact ones as float32 values, to be published."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {param: master for param in params if (master := master_of(param)) is not None}


def placeholder_masters(optimizer: Optimizer) -> Masters:
    """Return something of the dtype and device of each master, for when their values are not asked for."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {param: float32_like(kept) for param in params if (kept := stored_master(param)) is not None}


@contextmanager
def masters_as_params(optimizer: Optimizer, masters: Masters) -> Iterator[None]:
    """Inside, `param_groups` and `state` name masters in place of their half parameters."""
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
    """Exchange parameters, keeping the list and dict objects: LBFGS and others hold on to them."""
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
    """Inside, masters have their gradient, and parameters without one have theirs unscaled, in their own dtype."""
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
    """Put another gradient into a parameter; return the old one and the old `grad_dtype` if that had to change."""
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

    Also when the step raises: masters that it had updated by then are published, so that both agree. A stock optimizer that
    raises leaves its parameters updated just so far, and a copy of all masters, to roll back to, would cost their memory.
    """
    masters = masters_in(optimizer)
    try:
        with masters_as_params(optimizer, masters), true_gradients(slots, masters, factor):
            return own_step()
    finally:
        _publish(masters)


def step_with_closure(optimizer: Optimizer, own_step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """Run a step that evaluates a closure, once or (LBFGS) often.

    Each evaluation sees the model as it is: half parameters written from the masters, the optimizer holding its own
    parameters, so that `zero_grad` in the closure reaches their gradients.
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
    """The two contexts above as a switch."""

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
    # All, not only those with gradients: a rule of the user's own may move the others too.
    publish(list(masters), list(masters.values()))
