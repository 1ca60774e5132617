"""FP8 copies of weights, kept beside them: made once after each change, by the optimizer's update where it can."""

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
from mezzo.fp8._numbers import E4M3, amax_of
from mezzo.fp8._operands import AmaxHistory, Operand, by_triton, make_operand
from mezzo.fp8._recipe import MULTIPLE, Fp8Recipe

HEADROOM = 2.0
"""How much a weight may grow in one step before it is cut off: its scale is made from the step before."""

UNKNOWN_AMAX = 0.875
"""What the scale of an update is made from where all weights were zero before it: numbers from 2^-17 to 1.75 are told."""

INVERSE, AMAX, NEWEST = 0, 1, 2
"""Places in `WeightCopies.state`."""


def stream_number(device: torch.device) -> int:
    """Return what tells the current stream of a GPU from others, in a tenth of the time of `torch.cuda.current_stream`."""
    return raw_stream(device.index)


class WeightCopies:
    """A weight and its transpose in e4m3, one scale for both, and what their next scale is made from."""

    def __init__(self, weight: Tensor) -> None:
        self.device = weight.device
        with torch.inference_mode(False):  # a first call for inference must not make tensors that training cannot write
            self.values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
            self.transposed = self.values.new_empty(weight.shape[::-1])
            self.state = torch.zeros(4, device=weight.device)
            """float32: what undoes the scale, the amax that the next scale is made from, the amax that an update collects."""
            self._inverse = self.state[INVERSE]
        self._version: int | None = None
        self._address = 0
        self._storage: StorageWeakRef | None = None
        self._made_on: int | None = None
        self._made = torch.cuda.Event() if weight.is_cuda else None
        self.histories: dict[str, AmaxHistory] = {}
        """Delayed scaling of what meets this weight: its 'input' and the 'gradient' of its output."""

    def note(self, weight: Tensor) -> None:
        """Take the copies for those of the weight as it is now."""
        storage = weight.untyped_storage()
        if self._storage is None or self._storage.cdata != storage_id(storage):
            self._storage = StorageWeakRef(storage)  # while it is there, no other storage is taken for this one
        self._version, self._address = weight._version, weight.data_ptr()

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copies are those of the weight as it is."""
        if self._version != weight._version or self._address != weight.data_ptr() or self._storage is None:
            return False
        return bool(self._storage.cdata == storage_id(weight.untyped_storage()))

    def forget(self) -> None:
        """Have the copies made anew when they are asked for."""
        self._version = None

    def operand(self, weight: Tensor) -> Operand:
        """Return the copies, made anew if the weight has changed since."""
        if not self.is_of(weight):
            self.renew(weight)
        elif self._was_made_elsewhere():
            assert self._made is not None
            torch.cuda.current_stream(self.device).wait_event(self._made)
        return Operand(self.values, self._inverse, self.transposed, self._inverse)

    def _was_made_elsewhere(self) -> bool:
        """Whether another stream of this GPU made the copies; a capture is told nothing of other streams."""
        is_other = self._made_on is not None and self._made_on != stream_number(self.device)
        return is_other and not torch.cuda.is_current_stream_capturing()

    @torch.no_grad()
    def renew(self, weight: Tensor) -> None:
        """Make the copies from the weight as it is, whatever they were."""
        self.forget()  # whoever is interrupted below leaves nothing that passes for whole
        amax = amax_of(weight)
        made = make_operand(weight.detach().contiguous(), amax=amax.reshape(1), headroom=HEADROOM)
        self.values.copy_(made.values)  # where they are: a captured step knows their addresses
        self.transposed.copy_(made.transposed)
        nothing = torch.zeros_like(amax)
        known = torch.where(amax == 0, UNKNOWN_AMAX, amax)
        self.state.copy_(torch.stack((made.inverse, known, nothing, nothing)))
        if self._made is not None and not torch.cuda.is_current_stream_capturing():
            self._made_on = stream_number(self.device)
            self._made.record(torch.cuda.current_stream(self.device))
        self.note(weight)

    def history(self, role: str, length: int) -> AmaxHistory:
        """Return the history of what meets this weight."""
        found = self.histories.get(role)
        if found is None or len(found.amaxes) != length:
            with torch.inference_mode(False):
                found = self.histories[role] = AmaxHistory(length, self.device)
        return found


_copies = WeakIdKeyDictionary()
_made = 0
_capture: object | None = None


def count_of_copies() -> int:
    """Return how often a weight got copies: while it is the same, whoever had none has none."""
    return _made


def copies_of(weight: Tensor) -> WeightCopies | None:
    """Return the copies that are kept of a parameter, None if there are none. An alias of it (`.data`) has none."""
    found: WeightCopies | None = _copies.get(weight)
    fits = found is not None and found.device == weight.device and found.values.shape == weight.shape
    return found if fits else None


def copies_for_update(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight that the kernel of an update can write; None where they are made by the next forward."""
    found = copies_of(weight)
    if found is None or not by_triton(weight) or any(size % MULTIPLE for size in weight.shape):
        return None
    return found


@contextmanager
def capture_with_managed_copies() -> Iterator[None]:
    """Inside, a CUDA graph is captured whose owner sees to it that copies are those of the weights at each replay."""
    global _capture
    before, _capture = _capture, object()
    try:
        yield
    finally:
        _capture = before


def capture_in_progress() -> object | None:
    """Return what stands for the capture of `capture_with_managed_copies`, another object each; None outside."""
    return _capture


def keep_copies(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight, created at the first call; None if it gets none.

    Only a parameter with a master gets copies: the memory of others may change without a trace, as under FSDP, which
    gathers weights. Inside a CUDA graph of the user none are created, as replays would reuse those of the capture.
    """
    global _made
    if not isinstance(weight, nn.Parameter) or not has_master(weight) or weight.is_inference():
        return None
    if weight.is_cuda and _capture is None and torch.cuda.is_current_stream_capturing():
        return None
    found = copies_of(weight)
    if found is None:
        found = _copies[weight] = WeightCopies(weight)
        _made += 1
    return found


def drop_copies(weight: Tensor) -> None:
    """Free the copies of a weight that no longer is half."""
    global _made
    if _copies.pop(weight, None) is not None:
        _made += 1


def renew_copies(weights: Iterable[Tensor]) -> None:
    """Make the copies of those weights anew that have some: after `weight.data.copy_(x)`, which leaves no trace."""
    for weight in weights:
        found = copies_of(weight)
        if found is not None:
            found.renew(weight)


def histories_of(weights: Iterable[Tensor]) -> list[AmaxHistory]:
    """Return the histories by which what meets weights is scaled."""
    return [
        history for weight in weights if (kept := copies_of(weight)) is not None for history in kept.histories.values()
    ]


def weight_operand(weight: Tensor, recipe: Fp8Recipe) -> Operand:
    """Return a weight in FP8: the copies kept beside it, or made for this call."""
    kept = keep_copies(weight) if recipe.granularity == "tensor" else None
    if kept is not None:
        return kept.operand(weight)
    headroom = 1.0 if recipe.granularity == "row" else HEADROOM  # as in the copies: the same numbers either way
    return make_operand(weight.detach().contiguous(), by_row=recipe.granularity == "row", headroom=headroom)


def history_of(weight: Tensor, role: str, recipe: Fp8Recipe) -> AmaxHistory | None:
    """Return the history by which what meets a weight is scaled; None: by itself."""
    if recipe.scaling != "delayed":
        return None
    kept = keep_copies(weight)
    return None if kept is None else kept.history(role, recipe.history)
