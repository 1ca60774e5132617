"""What a plan of the step rests on, and whether it is still there: looked at in every step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mezzo.fp8 import MASTER_HOME, WeightCopies, copies_for_update, count_of_copies
from mezzo.optim._grads import Slot
from mezzo.optim._masters import kept_of, record_of

ALIGNMENT = 16  # bytes of the widest load


class Entry:
    """One parameter of a plan."""

    __slots__ = ("aligned", "copies", "grad", "index", "param", "record", "target", "tensors")

    def __init__(self, slot: Slot, tensors: dict[str, Tensor]) -> None:
        self.param, self.target, self.grad, self.index = slot.param, slot.target, slot.grad, slot.index
        self.record = record_of(slot.param)
        self.copies = _copies_of(slot.param, slot.target)
        self.tensors = tensors
        accessed = [slot.param, slot.target, slot.grad, *(t for key, t in tensors.items() if key != "step")]
        self.aligned = not any(t.data_ptr() % ALIGNMENT for t in accessed)


def _copies_of(param: Tensor, target: Tensor) -> WeightCopies | None:
    """Return the FP8 copies that the update of a parameter writes: of a half matrix whose rows lie one after the other."""
    if target is param or not param.is_contiguous() or not target.is_contiguous():
        return None
    return copies_for_update(param)


_grad_of, _dtype_of, _version_of = attrgetter("grad"), attrgetter("dtype"), attrgetter("_version")
_kept_in, _version_in = attrgetter("kept"), attrgetter("version")


class Watch:
    """The tensors of a plan as they were when it was made.

    Looked at in every step, where hundreds of small tensors are bound by the host: so in lists, one pass each.
    """

    def __init__(self, entries: Sequence[Entry], lr_tensors: Sequence[Tensor]) -> None:
        self._params = [entry.param for entry in entries]
        self._dtypes = list(map(_dtype_of, self._params))
        self._records = [entry.record for entry in entries]
        self._grad_dtypes = [entry.grad.dtype for entry in entries]
        self._sizes = [entry.grad.numel() for entry in entries]
        self._strides = [entry.grad.stride() for entry in entries]
        self._aligned = [entry.aligned for entry in entries]
        with_masters = [entry for entry in entries if entry.record is not None]
        self._halves = [entry.param for entry in with_masters]
        self._their_records: list[Any] = [entry.record for entry in with_masters]
        self._masters = [id(entry.target) for entry in with_masters]
        self._with_state = [entry.param for entry in entries if entry.tensors]
        keys = {key for entry in entries for key in entry.tensors}
        self._states = {key: [id(e.tensors.get(key)) for e in entries if e.tensors] for key in keys}
        tensors = [t for entry in entries for t in (entry.param, entry.target, *entry.tensors.values())]
        self._tensors = list({id(t): t for t in (*tensors, *lr_tensors)}.values())
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._targets = [entry.target for entry in entries]
        self._copies = [entry.copies for entry in entries]
        self._with_copies = [(entry.copies, entry.param) for entry in entries if entry.copies is not None]
        self._count_of_copies = count_of_copies()

    def holds(self, states: Any) -> bool:
        """Whether all tensors but the gradients are where they were; masters have followed edits of their weights."""
        if [getattr(param, MASTER_HOME, None) for param in self._params] != self._records:
            return False
        if list(map(_dtype_of, self._params)) != self._dtypes:
            return False
        if list(map(_version_of, self._halves)) != list(map(_version_in, self._their_records)):
            for param in self._halves:
                kept_of(param)
        if list(map(id, map(_kept_in, self._their_records))) != self._masters:
            return False
        rows: list[Any] = list(map(states.get, self._with_state))
        if any([row is None for row in rows]):
            return False
        for key, ids in self._states.items():
            if [id(row.get(key)) for row in rows] != ids:
                return False
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return False
        return self._copies_hold()

    def _copies_hold(self) -> bool:
        """Whether the same parameters have FP8 copies; those of a weight that was edited are then of what it is."""
        if self._count_of_copies != count_of_copies():  # somewhere a weight got its first, perhaps not here
            if list(map(_copies_of, self._params, self._targets)) != self._copies:
                return False
            self._count_of_copies = count_of_copies()
        for copies, param in self._with_copies:
            if not copies.is_of(param):
                copies.renew(param)  # the update's scale is made from them, and a captured step takes them as they are
        return True

    def has_copies(self, param: Tensor) -> bool:
        """Whether a parameter is one whose FP8 copies the update writes."""
        return any(known is param for _, known in self._with_copies)

    def grads_at(self) -> list[int] | None:
        """Return where the gradients are; None if they are not of the kind that they were."""
        grads: list[Any] = list(map(_grad_of, self._params))
        if any([type(grad) is not Tensor for grad in grads]):
            return None
        if list(map(_dtype_of, grads)) != self._grad_dtypes or list(map(Tensor.numel, grads)) != self._sizes:
            return None
        if list(map(Tensor.stride, grads)) != self._strides:
            return None
        found = list(map(Tensor.data_ptr, grads))
        if any([at % ALIGNMENT and aligned for at, aligned in zip(found, self._aligned, strict=True)]):
            return None
        return found

    def note_update(self) -> None:
        """Make autograd notice that parameters changed, and masters that it was by us."""
        torch.autograd.graph.increment_version(self._params)
        for record, param in zip(self._their_records, self._halves, strict=True):
            record.version = param._version
        for copies, param in self._with_copies:
            copies.note(param)
