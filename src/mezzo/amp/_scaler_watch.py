"""Gradients that still carry the loss scale: torch's own clipping and plain steps on them are warned about, once."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_watches: list[weakref.ref[ScaleWatch]] = []


class ScaleWatch:
    """What one scaler scaled since its last step, and whose gradients those are.

    Args:
        is_untouched: Whether the gradients of an optimizer are as backward left them: neither unscaled nor stepped.
    """

    def __init__(self, is_untouched: Callable[[Optimizer], bool]) -> None:
        self.is_pending = False
        """Whether a loss was scaled since the last step or update."""
        self._is_untouched = is_untouched
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_known = False
        self._last_known: Callable[[], Optimizer | None] = lambda: None
        self._last_root: Any = None
        self._warned: set[str] = set()
        _watch_torch()
        _watches.append(weakref.ref(self, _watches.remove))

    def note_scaled(self, scaled: Tensor) -> None:
        """Remember a scaled loss; until the first step also its graph, which says whose gradients it makes."""
        self.is_pending = True
        if not self._has_known and not torch.compiler.is_compiling():
            self._last_root = scaled.grad_fn

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Remember an optimizer that is unscaled or stepped through the scaler."""
        if self._last_known() is not optimizer:  # a weak set is slow
            self._last_root, self._has_known = None, True
            self._last_known = weakref.ref(optimizer)
            self._known.add(optimizer)

    def warn_once(self, key: str, message: str) -> None:
        """Warn at the user's line, once per scaler and key."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, UserWarning, stacklevel=_level_of_user())

    def carries_scale(self, grad: Tensor) -> bool:
        """Whether a gradient is known to carry the scale."""
        return any(param.grad is grad for param in self._scaled_params())

    def _scaled_params(self) -> Iterator[Tensor]:
        if not self._has_known:
            yield from _leaves(self._last_root)
            return
        for optimizer in self._known:
            if self._is_untouched(optimizer):
                yield from (param for group in optimizer.param_groups for param in group["params"])


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
    """Look at plain steps and at torch's clipping; once a process, when the first scaler is made."""
    register_optimizer_step_pre_hook(_look_at_step)
    # Wrapped where the clipping functions look it up: users import those themselves by name, before or after this.
    module: Any = clip_grad
    group_tensors = getattr(module, "_group_tensors_by_device_and_dtype", None)
    if group_tensors is None:  # another release of torch: clipping is not looked at
        return

    @functools.wraps(group_tensors)
    def look_and_group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _look_at_clipping(sys._getframe(1).f_code.co_name, tensors[0])
        return group_tensors(tensors, *args, **kwargs)

    module._group_tensors_by_device_and_dtype = look_and_group


def _pending() -> list[ScaleWatch]:
    return [watch for reference in _watches if (watch := reference()) is not None and watch.is_pending]


def _look_at_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for watch in _pending():
        grad = _first(p.grad for group in optimizer.param_groups for p in group["params"])
        if grad is not None and watch.carries_scale(grad) and watch._is_untouched(optimizer):
            watch.warn_once(
                "step",
                "optimizer.step() is called with gradients that carry the loss scale and moves the weights far too much: "
                "call scaler.step(optimizer) and scaler.update() instead",
            )


_CLIPPING = {
    "_clip_grads_with_norm_": ("clip_grad_norm_", ", or scaler.clip_grad_norm_(optimizer, max_norm) instead"),
    "clip_grad_value_": ("clip_grad_value_", ""),
}


def _look_at_clipping(caller: str, grads: Iterable[Tensor]) -> None:
    if caller not in _CLIPPING:
        return
    name, other_cure = _CLIPPING[caller]
    for watch in _pending():
        grad = _first(grads)
        if grad is not None and watch.carries_scale(grad):
            watch.warn_once(
                "clip",
                f"torch's {name} is called with gradients that carry the loss scale, so it clips far too much: call "
                f"scaler.unscale_(optimizer) before it{other_cure}",
            )


def _first(grads: Iterable[Tensor | None]) -> Tensor | None:
    return next((grad for grad in grads if grad is not None), None)


def _level_of_user() -> int:
    """Return the `stacklevel`, for a call of `warnings.warn` in the caller, of the first frame outside torch and mezzo."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "mezzo"):
        frame, level = frame.f_back, level + 1
    return level
