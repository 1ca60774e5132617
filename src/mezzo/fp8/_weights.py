"""FP8 copies of weights.

Made once after each change, if possible by the optimizer's update itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from mezzo._torch.parameters import has_master
from mezzo._torch.storages import storage_id
from mezzo._torch.streams import raw_stream
from mezzo.fp8._gathered import GatheredWeight
from mezzo.fp8._numbers import E4M3, amax_of
from mezzo.fp8._operands import AmaxHistory, Operand, has_fp8_kernels, make_operand
from mezzo.fp8._recipe import MULTIPLE, Fp8Recipe

HEADROOM = 2.0
"""A weight may grow by this factor in one step before it is clamped: its scale is from the step
before."""

UNKNOWN_AMAX = 0.875
"""Amax for the update of a weight of zeros: its scale covers numbers from 2^-17 to 1.75."""

INVERSE, AMAX, NEWEST = 0, 1, 2
"""Places in `WeightCopies.state`."""


def stream_number(device: torch.device) -> int:
    """Return a number of the current stream, ten times as fast as `torch.cuda.current_stream`."""
    return raw_stream(device.index)


class WeightCopies:
    """A weight and its transpose in e4m3, with one scale, and the amax for the next scale."""

    def __init__(self, weight: Tensor) -> None:
        self.device = weight.device
        # Training must be able to write tensors from a first call for inference
        with torch.inference_mode(False):
            self.values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
            self.transposed = self.values.new_empty(weight.shape[::-1])
            self.state = torch.zeros(4, device=weight.device)
            """float32: inverse scale, amax for the next scale, amax that an update collects."""
            self._inverse = self.state[INVERSE]
        self._version: int | None = None
        self._address = 0
        self._storage: StorageWeakRef | None = None
        self._written_on: int | None = None
        self._written = torch.cuda.Event() if weight.is_cuda else None
        self.histories: dict[str, AmaxHistory] = {}
        """Delayed scaling of the 'input' of this weight's layer and of the 'gradient' of its
        output."""

    def note(self, weight: Tensor) -> None:
        """Note that the copies match the weight as it is now."""
        storage = weight.untyped_storage()
        if self._storage is None or self._storage.cdata != storage_id(storage):
            # While this reference exists, no other storage gets its id
            self._storage = StorageWeakRef(storage)
        self._version, self._address = weight._version, weight.data_ptr()

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copies match the weight as it is now."""
        if self._version != weight._version or self._address != weight.data_ptr() or self._storage is None:
            return False
        return bool(self._storage.cdata == storage_id(weight.untyped_storage()))

    def forget(self) -> None:
        """Make the copies anew at the next use."""
        self._version = None

    def operand(self, weight: Tensor) -> Operand:
        """Return the copies, made anew if the weight has changed."""
        if not self.is_of(weight):
            self.renew(weight)
        elif self._is_from_other_stream():
            assert self._written is not None
            torch.cuda.current_stream(self.device).wait_event(self._written)
        return Operand(self.values, self._inverse, self.transposed, self._inverse)

    def _is_from_other_stream(self) -> bool:
        """Whether another stream made the copies.

        False during a capture, which must not wait for it.
        """
        is_other = self._written_on is not None and self._written_on != stream_number(self.device)
        return is_other and not torch.cuda.is_current_stream_capturing()

    @torch.no_grad()
    def renew(self, weight: Tensor) -> None:
        """Make the copies anew, in place."""
        self.forget()  # so that an interrupt below leaves no copies that look complete
        amax = amax_of(weight)
        operand = make_operand(weight.detach().contiguous(), amax=amax.reshape(1), headroom=HEADROOM)
        self.values.copy_(operand.values)  # in place: a captured step knows the addresses
        self.transposed.copy_(operand.transposed)
        zero = torch.zeros_like(amax)
        known = torch.where(amax == 0, UNKNOWN_AMAX, amax)
        self.state.copy_(torch.stack((operand.inverse, known, zero, zero)))
        if self._written is not None and not torch.cuda.is_current_stream_capturing():
            self._written_on = stream_number(self.device)
            self._written.record(torch.cuda.current_stream(self.device))
        self.note(weight)

    def history(self, role: str, length: int) -> AmaxHistory:
        """Return the history of the 'input' or the 'gradient'."""
        found = self.histories.get(role)
        if found is None or len(found.amaxes) != length:
            with torch.inference_mode(False):
                found = self.histories[role] = AmaxHistory(length, self.device)
        return found


_copies = WeakIdKeyDictionary()
_changes = 0
_capture: object | None = None


def count_of_copies() -> int:
    """Return a number that changes whenever some weight gets or loses its copies."""
    return _changes


def copies_of(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a parameter; None if it has none.

    Aliases (`.data`) never have copies.
    """
    found: WeightCopies | None = _copies.get(weight)
    fits = found is not None and found.device == weight.device and found.values.shape == weight.shape
    return found if fits else None


def copies_for_update(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight if the update kernel can write them.

    None if the next forward makes them.
    """
    found = copies_of(weight)
    if found is None or not has_fp8_kernels(weight) or any(size % MULTIPLE for size in weight.shape):
        return None
    return found


@contextmanager
def capture_with_managed_copies() -> Iterator[None]:
    """Return a context for a capture whose owner updates the copies before each replay."""
    global _capture
    before, _capture = _capture, object()
    try:
        yield
    finally:
        _capture = before


def capture_in_progress() -> object | None:
    """Return an object that identifies the current `capture_with_managed_copies`; None outside."""
    return _capture


def keep_copies(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight, created at the first call; None if it gets none.

    Only a parameter with a master gets copies: the memory of others may change without a trace, as
    under FSDP, which gathers weights. Inside a CUDA graph of the user none are created, as replays
    would reuse those of the capture.
    """
    global _changes
    if not isinstance(weight, nn.Parameter) or not has_master(weight) or weight.is_inference():
        return None
    if weight.is_cuda and _capture is None and torch.cuda.is_current_stream_capturing():
        return None
    found = copies_of(weight)
    if found is None:
        found = _copies[weight] = WeightCopies(weight)
        _changes += 1
    return found


def drop_copies(weight: Tensor) -> None:
    """Drop the copies of a weight that is no longer half."""
    global _changes
    if _copies.pop(weight, None) is not None:
        _changes += 1


def renew_copies(weights: Iterable[Tensor]) -> None:
    """Make existing copies of weights anew, after `weight.data.copy_(x)`."""
    for weight in weights:
        found = copies_of(weight)
        if found is not None:
            found.renew(weight)


def histories_of(weights: Iterable[Tensor]) -> list[AmaxHistory]:
    """Return the histories of the delayed scales of weights."""
    return [
        history for weight in weights if (kept := copies_of(weight)) is not None for history in kept.histories.values()
    ]


def weight_operand(weight: Tensor, recipe: Fp8Recipe, *, transposed: bool) -> Operand:
    """Return a weight in FP8: its copies, or an operand for this call, which has one of the layouts."""
    if isinstance(weight, GatheredWeight):
        return weight.operand(transposed=transposed)
    kept = keep_copies(weight) if recipe.granularity == "tensor" else None
    if kept is not None:
        return kept.operand(weight)
    # As in the copies, so that both give the same numbers
    headroom = 1.0 if recipe.granularity == "row" else HEADROOM
    return make_operand(
        weight.detach().contiguous(),
        values=not transposed,
        transposed=transposed,
        by_row=recipe.granularity == "row",
        headroom=headroom,
    )


def history_of(weight: Tensor, role: str, recipe: Fp8Recipe) -> AmaxHistory | None:
    """Return the history of a weight's input or gradient; None for current scaling."""
    if recipe.scaling != "delayed":
        return None
    kept = keep_copies(weight)
    return None if kept is None else kept.history(role, recipe.history)
