"""float32 leaks: operators that return float32 from half inputs and so push later operators into float32.

A tensor is followed from the kernel that made it float32, through the operators that compute on it in float32, to the
cast back to half. On the way each operator moves twice the bytes, and the cast is one more pass.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.dtypes import HALF_DTYPES
from mezzo.record._kernel_runs import EXCLUDED, KernelOp, KernelRun, find_tensors

_FULL = frozenset({torch.float32, torch.complex64})
_HALF_BYTES = 2  # additional bytes per element in float32


@dataclass(frozen=True, slots=True)
class Leak:
    """All leaks of one call site."""

    op: str
    """The torch-level call that first returned float32: `interpolate`, `add`, `to`."""
    module: str
    line: str
    reason: str
    """The policy's reason, or which input promoted it."""
    followers: tuple[str, ...]
    """Operators that computed in float32 because of it, in order, each once."""
    fed: tuple[str, ...]
    """Half operators that used the result, as `module: operator`."""
    calls: int
    extra_bytes: int
    """Additional bytes that float32 wrote in the forward, compared with half."""


@dataclass(slots=True)
class _Place:
    """Where float32 begins, and where it goes."""

    op: str
    module: str
    line: str
    reason: str
    followers: dict[str, None] = field(default_factory=dict)
    fed: dict[str, None] = field(default_factory=dict)
    calls: int = 0
    extra_bytes: int = 0


@dataclass(slots=True)
class _Flow:
    """One result in float32, from the call that made it."""

    place: _Place
    call: int
    own_bytes: int = 0
    """Bytes written by that call itself; they count as soon as another call uses the result."""

    def leave(self) -> None:
        self.place.calls += self.own_bytes > 0
        self.place.extra_bytes += self.own_bytes
        self.own_bytes = 0


class LeakTracker:
    """A listener that follows float32 results of half inputs; only in the forward, because gradients follow it."""

    wants_lines = True
    wants_times = False

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, str], _Place] = {}
        self._flows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator is followed: also views."""
        return op.has_tensors

    def receive(self, kernel: KernelRun) -> None:
        """Follow the tensors of a kernel."""
        if kernel.phase != "forward":
            return
        with self._lock:
            inputs, outputs = _followed((*kernel.args, *kernel.kwargs.values())), _followed((kernel.out,))
            flows = list({id(flow): flow for tensor in inputs for flow in self._flows.get(tensor, ())}.values())
            full = [tensor for tensor in outputs if tensor.dtype in _FULL]
            older = [flow for flow in flows if flow.call != kernel.call]
            for flow in older:
                self._go_on(flow, kernel, is_half=bool(outputs) and not full)
            flows = older or flows  # a cast by the call itself, to match a float32 tensor, is not a leak
            if not flows and full and any(tensor.dtype in HALF_DTYPES for tensor in inputs):
                flows = [_Flow(self._place(kernel, inputs), kernel.call)]
            for tensor in full if flows else ():
                self._mark(tensor, flows, kernel)

    def _mark(self, tensor: Tensor, flows: list[_Flow], kernel: KernelRun) -> None:
        """Assign a tensor, and the base of a view that was written to, to flows; the first flow counts the bytes."""
        self._flows[tensor] = flows
        if kernel.op.is_in_place and tensor._base is not None:
            self._flows[tensor._base] = flows
        if kernel.op.computes and kernel.call == flows[0].call:
            flows[0].own_bytes += _HALF_BYTES * tensor.numel()
        elif kernel.op.computes:
            flows[0].place.extra_bytes += _HALF_BYTES * tensor.numel()

    def _go_on(self, flow: _Flow, kernel: KernelRun, *, is_half: bool) -> None:
        if is_half:  # a half operator used it
            flow.place.fed[f"{kernel.module}: {_name(kernel)}" if kernel.module else _name(kernel)] = None
            flow.leave()
        elif kernel.op.computes:
            flow.place.followers[_name(kernel)] = None
            flow.leave()

    def _place(self, kernel: KernelRun, inputs: list[Tensor]) -> _Place:
        key = (_name(kernel), kernel.module, kernel.line)
        if key not in self._places:
            self._places[key] = _Place(*key, _why(kernel, inputs))
        return self._places[key]

    def leaks(self) -> list[Leak]:
        """Return the leaks that fed a half operator, most bytes first."""
        with self._lock:
            found = [
                Leak(o.op, o.module, o.line, o.reason, tuple(o.followers), tuple(o.fed), o.calls, o.extra_bytes)
                for o in self._places.values()
                if o.fed
            ]
        return sorted(found, key=lambda leak: (-leak.extra_bytes, leak.module, leak.op))


def _followed(values: Iterable[Any]) -> list[Tensor]:
    return [tensor for tensor in find_tensors(values) if tensor.is_floating_point() or tensor.is_complex()]


def _name(kernel: KernelRun) -> str:
    return kernel.api_op or kernel.op.name


def _why(kernel: KernelRun, inputs: list[Tensor]) -> str:
    if kernel.reason == EXCLUDED:
        return EXCLUDED
    if kernel.cast is None and any(t.dtype is torch.float32 for t in inputs):
        return "promoted: another input is float32"
    if kernel.api_op in ("to", "float", "type", "type_as"):
        return "cast by the model's own code"
    return kernel.reason
