"""Warns, once, of torch's clipping and of plain steps on gradients that carry the loss scale."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, distributed
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mezzo._torch.autograd_engine import hook_only, queue_callback
from mezzo._torch.clipping import wrap_grouping_of_gradients
from mezzo.amp.user_lines import level_of_user

_watches: list[weakref.ref[ScaleWatch]] = []
_WALKS = 4
"""How many graphs are searched for parameters while no optimizer is known: the first losses reach
all of them."""
# A mistake in a training loop shows from the first step on, and a look costs 15 microseconds
_LOOKS = 100
_PATIENCE = 1000
"""Scaled losses after which a scaler that never saw an optimizer stops looking."""

_Snapshot = list[tuple["weakref.ref[Tensor]", int, int]]


class ScaleWatch:
    """Knows the gradients of scaled losses that are unchanged since the backward pass.

    A hook on the scaled loss compares gradients before and after its backward pass: those of one
    parameter per known optimizer, or before the first step those of all parameters that the losses
    reach. Gradients are identified by object and version, so a new, zeroed or rewritten gradient no
    longer counts. Only weak references are kept. Changes that leave no trace (`grad.data.div_()`, a
    reentrant checkpoint) are not noticed.
    """

    def __init__(self) -> None:
        self._scaled: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Gradients that carry the scale, by id."""
        self._known: dict[int, tuple[weakref.ref[Optimizer], weakref.ref[Tensor]]] = {}
        """Optimizers that the scaler unscaled or stepped, by id, with the parameter that is
        compared."""
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._losses_without_optimizer = 0
        self._looks_left = _LOOKS
        self._warned: set[str] = set()
        _watch_torch()
        _watches.append(weakref.ref(self, _watches.remove))

    def note_scaled(self, scaled: Tensor) -> None:
        """Watch the backward pass of a scaled loss."""
        if self._looks_left == 0 or is_dynamo_compiling() or ("step" in self._warned and "clip" in self._warned):
            return
        self._looks_left -= 1
        if self._looks_left == 0:
            self._scaled.clear()
            return
        if not self._known and not self._look_for_leaves(scaled):
            return
        hook_only(scaled, self._begin_backward)

    def _look_for_leaves(self, scaled: Tensor) -> bool:
        """Find parameters while no optimizer is known; return False once that is given up."""
        if self._losses_without_optimizer >= _PATIENCE:
            return False
        self._losses_without_optimizer += 1
        if self._losses_without_optimizer <= _WALKS:
            self._leaves |= {id(leaf): weakref.ref(leaf) for leaf in _leaves(scaled.grad_fn)}
        return True

    def _begin_backward(self, _grad: Tensor) -> None:
        if is_dynamo_compiling():  # compiled autograd
            return
        params = [param for _, param in self._known.values()] if self._known else self._leaves.values()
        before: _Snapshot = [(param, *_state_of(param())) for param in params]
        end = functools.partial(self._end_backward, before)
        # after DDP's own callback, which writes the mean over the ranks into the gradients
        has_ranks = distributed.is_available() and distributed.is_initialized()
        queue_callback(functools.partial(queue_callback, end) if has_ranks else end)

    def _end_backward(self, before: _Snapshot) -> None:
        self._scaled = {key: entry for key, entry in self._scaled.items() if entry[0]() is not None}
        for param, *state in before:
            owner = param()
            grad = None if owner is None else owner.grad
            if grad is not None and [id(grad), _version_of(grad)] != state:
                self._scaled[id(grad)] = weakref.ref(grad), _version_of(grad)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that the scaler unscales or steps an optimizer.

        Its gradients no longer carry the scale.
        """
        reference, param = self._known.get(id(optimizer), (None, None))
        if reference is None or param is None or reference() is not optimizer:
            return self._learn(optimizer)
        owner = param()
        grad = None if owner is None else owner.grad
        if grad is None:
            return self._learn(optimizer)
        self._scaled.pop(id(grad), None)

    def _learn(self, optimizer: Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        first = next((param for param in params if param.grad is not None), None)
        if first is None:
            return
        if self._scaled:
            for param in params:
                self._scaled.pop(id(param.grad), None)
        self._known = {key: entry for key, entry in self._known.items() if entry[0]() is not None}
        self._known[id(optimizer)] = weakref.ref(optimizer), weakref.ref(first)
        self._leaves.clear()

    def warn_once(self, key: str, message: str) -> None:
        """Warn at the user's line, once per scaler and key."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, UserWarning, stacklevel=level_of_user())

    def has_reason(self, key: str) -> bool:
        """Whether some gradient carries the scale and the warning was not given yet."""
        return bool(self._scaled) and key not in self._warned

    def carries_scale(self, grad: Tensor) -> bool:
        """Whether a gradient is unchanged since the backward pass of a scaled loss."""
        reference, version = self._scaled.get(id(grad), (None, 0))
        return reference is not None and reference() is grad and _version_of(grad) == version


def _state_of(param: Tensor | None) -> tuple[int, int]:
    grad = None if param is None else param.grad
    return (0, 0) if grad is None else (id(grad), _version_of(grad))


def _version_of(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version  # inference tensors have none


def _leaves(root: Any) -> Iterator[Tensor]:
    """Yield the parameters that a backward pass from a node reaches."""
    nodes, seen = [root] if root is not None else [], {root}
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        nodes += following


@functools.cache
def _watch_torch() -> None:
    """Watch plain steps and torch's clipping; once per process, from the first scaler on."""
    register_optimizer_step_pre_hook(_look_at_step)
    wrap_grouping_of_gradients(_looking)


def _looking(group_tensors: Callable[..., Any]) -> Callable[..., Any]:
    def look_and_group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            _look_at_clipping(sys._getframe(1).f_code.co_name, tensors[0])
        return group_tensors(tensors, *args, **kwargs)

    return look_and_group


def _watches_for(key: str) -> list[ScaleWatch]:
    return [watch for reference in _watches if (watch := reference()) is not None and watch.has_reason(key)]


def _look_at_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if is_dynamo_compiling():
        return
    for watch in _watches_for("step"):
        grad = _first(p.grad for group in optimizer.param_groups for p in group["params"])
        if grad is not None and watch.carries_scale(grad):
            watch.warn_once(
                "step",
                "optimizer.step() is called with gradients that carry the loss scale and moves the weights far too much: "
                "call scaler.step(optimizer) and scaler.update() instead, or precision.step(optimizer) if you use "
                "mezzo.Precision",
            )


_CLIPPING = {
    "_clip_grads_with_norm_": ("clip_grad_norm_", ", or scaler.clip_grad_norm_(optimizer, max_norm) instead"),
    "clip_grad_value_": ("clip_grad_value_", ""),
}


def _look_at_clipping(caller: str, grads: Sequence[Tensor]) -> None:
    if caller not in _CLIPPING:
        return
    name, other_cure = _CLIPPING[caller]
    for watch in _watches_for("clip"):
        if any(watch.carries_scale(grad) for grad in grads):
            watch.warn_once(
                "clip",
                f"torch's {name} is called with gradients that carry the loss scale, so it clips far too much: call "
                f"scaler.unscale_(optimizer) before it{other_cure}. If you use mezzo.Precision, its "
                "step(optimizer, max_norm=1.0) clips",
            )


def _first(grads: Iterable[Tensor | None]) -> Tensor | None:
    return next((grad for grad in grads if grad is not None), None)
