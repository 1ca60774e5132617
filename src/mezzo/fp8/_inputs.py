"""Inputs of layers in FP8, converted once for layers that share them (queries, keys, values)."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.fp8._operands import Operand, make_operand
from mezzo.fp8._weights import capture_in_progress, stream_number


@dataclass(frozen=True, slots=True)
class _Last:
    """An operand, and the tensor that it was converted from."""

    source: weakref.ref[Tensor]
    key: tuple[Any, ...]
    operand: Operand


class _Slot:
    """The last operand of a thread; dropped together with the tensor that it was converted from."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: _Last | None = None

    def fill(self, x: Tensor, key: tuple[Any, ...], operand: Operand) -> None:
        def forget(source: weakref.ref[Tensor]) -> None:
            if self.last is not None and self.last.source is source:
                self.last = None

        self.last = _Last(weakref.ref(x, forget), key, operand)

    def find(self, x: Tensor, key: tuple[Any, ...]) -> Operand | None:
        last = self.last
        return last.operand if last is not None and last.source() is x and last.key == key else None


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_thread = _ThreadState()


def input_operand(x: Tensor, *, by_row: bool) -> Operand:
    """Return a layer's input in FP8 with current scaling.

    Reused if the layer before had the same input.

    Only for training: there, changing the input of a layer without a new version breaks gradients
    anyway.

    Args:
        x: [..., inputs], half.
        by_row: One scale per row.
    """
    key = _key(x, by_row)
    found = None if key is None else _thread.slot.find(x, key)
    if found is not None:
        return found
    operand = make_operand(x.reshape(-1, x.shape[-1]).contiguous(), by_row=by_row)
    if key is not None:
        _thread.slot.fill(x, key, operand)
    return operand


def _key(x: Tensor, by_row: bool) -> tuple[Any, ...] | None:
    """Return what an operand depends on besides the identity of its tensor.

    None: do not share it.
    """
    if x.is_inference():
        return None  # inference tensors have no version
    if not x.is_cuda:
        return x._version, x.data_ptr(), by_row
    capture = capture_in_progress()
    if capture is None and torch.cuda.is_current_stream_capturing():
        return None  # a graph of the user: during a capture the operand has no values yet
    return x._version, x.data_ptr(), by_row, stream_number(x.device), capture
