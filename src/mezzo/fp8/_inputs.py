"""The input of a layer in FP8, converted once for layers that share it: queries, keys and values, a gate and what it opens."""

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
    """An operand, and the tensor as it was when it was made from it."""

    source: weakref.ref[Tensor]
    key: tuple[Any, ...]
    operand: Operand


class _Slot:
    """What a thread converted last; empty as soon as the tensor that it was made from is gone."""

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


class _Here(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_here = _Here()


def input_operand(x: Tensor, *, by_row: bool) -> Operand:
    """Return a layer's input, scaled by itself: what was made of it for the layer before, if that had the same one.

    For training alone: whoever writes into the input of a layer and leaves no version breaks any layer's gradient.

    Args:
        x: [..., inputs], half.
        by_row: One scale a row.
    """
    key = _key(x, by_row)
    found = None if key is None else _here.slot.find(x, key)
    if found is not None:
        return found
    operand = make_operand(x.reshape(-1, x.shape[-1]).contiguous(), by_row=by_row)
    if key is not None:
        _here.slot.fill(x, key, operand)
    return operand


def _key(x: Tensor, by_row: bool) -> tuple[Any, ...] | None:
    """Return what an operand depends on besides the tensor's identity; None: it cannot be told, nothing is shared."""
    if x.is_inference():
        return None  # it has no version
    if not x.is_cuda:
        return x._version, x.data_ptr(), by_row
    capture = capture_in_progress()
    if capture is None and torch.cuda.is_current_stream_capturing():
        return None  # a graph of somebody else's: the next one must not take what this one only planned
    return x._version, x.data_ptr(), by_row, stream_number(x.device), capture
