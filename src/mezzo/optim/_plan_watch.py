"""What a plan of the step was built from, and whether it is still there: compared in every step.

Steps with hundreds of small tensors are bound by the host. So each part keeps lists, and compares a
list in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from mezzo._torch.parameters import MASTER_ATTRIBUTE
from mezzo.fp8 import WeightCopies, copies_for_update, count_of_copies
from mezzo.optim._grads import Slot
from mezzo.optim._masters import master_record, stored_master

ALIGNMENT = 16  # bytes of the widest load

_grad_of, _dtype_of, _version_of = attrgetter("grad"), attrgetter("dtype"), attrgetter("_version")
_stored_in, _version_in = attrgetter("stored"), attrgetter("version")


class PlanEntry:
    """One parameter of a plan: its tensors as they were when the plan was built."""

    __slots__ = ("aligned", "copies", "grad", "index", "param", "record", "state", "target")

    def __init__(self, slot: Slot, state: dict[str, Tensor]) -> None:
        self.param, self.target, self.grad, self.index = slot.param, slot.target, slot.grad, slot.index
        self.record = master_record(slot.param)
        self.copies = _copies_of(slot.param, slot.target)
        self.state = state
        accessed = [slot.param, slot.target, slot.grad, *(t for key, t in state.items() if key != "step")]
        self.aligned = not any(t.data_ptr() % ALIGNMENT for t in accessed)


def _copies_of(param: Tensor, target: Tensor) -> WeightCopies | None:
    """Return the FP8 copies that the update of a parameter writes.

    Those of a contiguous half matrix.
    """
    if target is param or not param.is_contiguous() or not target.is_contiguous():
        return None
    return copies_for_update(param)


class _Members:
    """Which parameters the optimizer has, in which groups, and which of them have gradients."""

    def __init__(self, param_groups: Sequence[dict[str, Any]], entries: Sequence[PlanEntry]) -> None:
        self._params = [p for group in param_groups for p in group["params"]]
        self._group_sizes = [len(group["params"]) for group in param_groups]
        with_grads = {entry.index for entry in entries}
        absent = [p for i, p in enumerate(self._params) if i not in with_grads]
        self._without_grad = [p for p in absent if p.numel()]
        self._empty = [p for p in absent if not p.numel()]

    def are_same(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        params = [p for group in param_groups for p in group["params"]]
        if [len(group["params"]) for group in param_groups] != self._group_sizes:
            return False
        return all(map(is_, params, self._params)) and not any([p.numel() for p in self._empty])

    def others_have_grads(self) -> bool:
        return any([p.grad is not None for p in self._without_grad])


class _Masters:
    """The masters of half parameters."""

    def __init__(self, entries: Sequence[PlanEntry]) -> None:
        self._params = [entry.param for entry in entries]
        self._dtypes = list(map(_dtype_of, self._params))
        self._records = [entry.record for entry in entries]
        with_masters = [entry for entry in entries if entry.record is not None]
        self._halves = [entry.param for entry in with_masters]
        self._their_records: list[Any] = [entry.record for entry in with_masters]
        self._kept = [id(entry.target) for entry in with_masters]

    def refresh(self) -> bool:
        """Let masters follow edits of their weights.

        Return whether they are still the same tensors.
        """
        if [getattr(param, MASTER_ATTRIBUTE, None) for param in self._params] != self._records:
            return False
        if list(map(_dtype_of, self._params)) != self._dtypes:
            return False
        if list(map(_version_of, self._halves)) != list(map(_version_in, self._their_records)):
            for param in self._halves:
                stored_master(param)
        return list(map(id, map(_stored_in, self._their_records))) == self._kept

    def note_update(self) -> None:
        """Increase the versions of the parameters, and note that the masters changed too."""
        torch.autograd.graph.increment_version(self._params)
        for record, param in zip(self._their_records, self._halves, strict=True):
            record.version = param._version


class _State:
    """The optimizer's state tensors."""

    def __init__(self, entries: Sequence[PlanEntry]) -> None:
        with_state = [entry for entry in entries if entry.state]
        self._params = [entry.param for entry in with_state]
        keys = {key for entry in with_state for key in entry.state}
        self._ids = {key: [id(entry.state.get(key)) for entry in with_state] for key in keys}

    def is_same(self, state: Any) -> bool:
        rows: list[Any] = list(map(state.get, self._params))
        if any([row is None for row in rows]):
            return False
        return all([[id(row.get(key)) for row in rows] == ids for key, ids in self._ids.items()])


class _Addresses:
    """Where the tensors are that the table names, except the gradients."""

    def __init__(self, entries: Sequence[PlanEntry], lr_tensors: Sequence[Tensor]) -> None:
        tensors = [t for entry in entries for t in (entry.param, entry.target, *entry.state.values())]
        self._tensors = list({id(t): t for t in (*tensors, *lr_tensors)}.values())
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    def are_same(self) -> bool:
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses


class _Copies:
    """The FP8 copies of weights that the update writes."""

    def __init__(self, entries: Sequence[PlanEntry]) -> None:
        self._params = [entry.param for entry in entries]
        self._targets = [entry.target for entry in entries]
        self._copies = [entry.copies for entry in entries]
        self._with_copies = [(entry.copies, entry.param) for entry in entries if entry.copies is not None]
        self._count = count_of_copies()

    def refresh(self) -> bool:
        """Make the copies of edited weights anew.

        Return whether the same parameters have the same copies.
        """
        # Some weight got its first copies, perhaps one of another optimizer
        if self._count != count_of_copies():
            if list(map(_copies_of, self._params, self._targets)) != self._copies:
                return False
            self._count = count_of_copies()
        for copies, param in self._with_copies:
            if not copies.is_of(param):
                # The update takes its scale from them, and so does a captured step
                copies.renew(param)
        return True

    def include(self, param: Tensor) -> bool:
        return any(known is param for _, known in self._with_copies)

    def note_update(self) -> None:
        for copies, param in self._with_copies:
            copies.note(param)


class _Grads:
    """The kind of the gradients: dtype, size, layout, alignment."""

    def __init__(self, entries: Sequence[PlanEntry]) -> None:
        self._params = [entry.param for entry in entries]
        self._dtypes = [entry.grad.dtype for entry in entries]
        self._sizes = [entry.grad.numel() for entry in entries]
        self._strides = [entry.grad.stride() for entry in entries]
        self._aligned = [entry.aligned for entry in entries]

    def find(self) -> list[int] | None:
        """Return the addresses of the gradients.

        None if they are not of the kind that they were.
        """
        grads: list[Any] = list(map(_grad_of, self._params))
        if set(map(type, grads)) != {Tensor}:
            return None
        if list(map(_dtype_of, grads)) != self._dtypes or list(map(Tensor.numel, grads)) != self._sizes:
            return None
        if list(map(Tensor.stride, grads)) != self._strides:
            return None
        found = list(map(Tensor.data_ptr, grads))
        if any([at % ALIGNMENT and aligned for at, aligned in zip(found, self._aligned, strict=True)]):
            return None
        return found


class PlanWatch:
    """All that a plan was built from, except the options of the parameter groups."""

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        entries: Sequence[PlanEntry],
        lr_tensors: Sequence[Tensor],
    ) -> None:
        self._members = _Members(param_groups, entries)
        self._masters = _Masters(entries)
        self._state = _State(entries)
        self._addresses = _Addresses(entries, lr_tensors)
        self._copies = _Copies(entries)
        self._grads = _Grads(entries)

    def has_same_members(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same parameters, and none that was empty has grown."""
        return self._members.are_same(param_groups)

    def refresh(self, state: Any) -> bool:
        """Let masters and FP8 copies follow edits of their weights.

        Return whether all tensors are where they were.

        Gradients are not looked at: see `find_grads`.
        """
        if not self._masters.refresh() or not self._state.is_same(state) or not self._addresses.are_same():
            return False
        return self._copies.refresh()

    def find_grads(self) -> list[int] | None:
        """Return the addresses of the gradients.

        None if other parameters have one, or they are of another kind.
        """
        return None if self._members.others_have_grads() else self._grads.find()

    def has_copies(self, param: Tensor) -> bool:
        """Whether the update writes the FP8 copies of a parameter."""
        return self._copies.include(param)

    def note_update(self) -> None:
        """Note that kernels changed the parameters, which torch does not see."""
        self._masters.note_update()
        self._copies.note_update()
