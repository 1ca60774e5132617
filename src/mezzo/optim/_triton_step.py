"""The step of SGD, Adam and AdamW in Triton.

Plans that are kept between steps, and their launches.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from mezzo.optim import _fused, _triton_launch
from mezzo.optim._check import Verdict
from mezzo.optim._compact import REST_DTYPE
from mezzo.optim._grads import Slot, gather, same_order
from mezzo.optim._plan_options import GroupOptions, OptionTable
from mezzo.optim._plan_table import AddressTable, Member, addresses_of
from mezzo.optim._plan_watch import PlanEntry, PlanWatch
from mezzo.optim._triton_check import check_kernel
from mezzo.optim._triton_launch import (
    ADAM_BLOCKS,
    CHECK_BLOCK,
    CHECK_BLOCKS,
    CHECK_WARPS,
    DTYPES,
    SGD_BLOCKS,
    Batch,
    LaunchKey,
)
from mezzo.optim._triton_update import adam_kernel, sgd_kernel


class Readiness(enum.Enum):
    """What `StepPlan.prepare` found."""

    READY = enum.auto()
    OTHER_GRADS = enum.auto()
    """Not for these gradients; it may be again."""
    STALE = enum.auto()
    """Something that the plan was built from is gone."""


def _is_covered(optimizer: Optimizer, groups: Sequence[Sequence[Slot]]) -> bool:
    slots = [s for group in groups for s in group if s.target.numel()]
    if not slots or not _fused.covers(optimizer, groups) or len({id(s.param) for s in slots}) < len(slots):
        return False
    device = slots[0].target.device
    return all(
        s.is_plain
        and type(s.grad) is Tensor
        and not s.grad.is_neg()
        and s.local_target is s.target
        and s.kind[0] == device
        and s.kind[1] == torch.float32
        and s.grad.dtype in DTYPES
        and s.grad.device == device
        and same_order(s.grad, s.target)
        and same_order(s.param, s.target)
        for s in slots
    ) and all(_lr_is_readable(group["lr"], device) for group in optimizer.param_groups)


def _lr_is_readable(lr: Any, device: torch.device) -> bool:
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return True
    return lr.device == device and lr.dtype == torch.float32 and lr.numel() == 1


class StepPlan:
    """Everything a step needs on the device, for one set of parameters with gradients.

    Built from the parameters as they are. `prepare` brings it up to date in each step, as far as it
    can.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Slot]], state_dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self.device = next(s.target.device for slots in groups for s in slots if s.target.numel())
        self._options = OptionTable(optimizer, self.device)
        launches = _sort_by_launch(optimizer, groups, self._options.groups, state_dtype)
        members = [member for batch in launches.values() for member in batch]
        entries = [entry for _, entry in members]
        self._watch = PlanWatch(optimizer.param_groups, entries, self._options.lr_tensors)
        lr_tensors = [group.lr_tensor for group in self._options.groups]
        self._table = AddressTable(addresses_of(members, lr_tensors), self.device)
        self._batches: list[Batch] = []
        first_row = 0
        for key, batch in launches.items():
            targets = [entry.target for _, entry in batch]
            self._batches.append(Batch.of_targets(key, targets, self._table.on_device[first_row:]))
            first_row += len(batch)
        self._kernel = sgd_kernel if type(optimizer) is SGD else adam_kernel
        self._param_count = sum(len(group["params"]) for group in optimizer.param_groups)
        self._check_programs = sum(len(batch.check_chunks) for batch in self._batches)
        self._between_checks = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._partial_sums: Tensor | None = None

    def prepare(self) -> Readiness:
        """Do as `refresh`, and send the addresses of gradients that moved."""
        if not self.refresh():
            return Readiness.STALE
        grads_at = self._watch.find_grads()
        if grads_at is None:
            return Readiness.OTHER_GRADS
        self._table.send_grads(grads_at)
        return Readiness.READY

    def refresh(self) -> bool:
        """Send options that changed, and let masters and FP8 copies follow edits of their weights.

        Returns:
            Whether the plan is still right, apart from gradients.
        """
        groups = self._optimizer.param_groups
        if not self._watch.has_same_members(groups) or not self._options.refresh(groups):
            return False
        return self._watch.refresh(self._optimizer.state)

    def writes_copies_of(self, param: Tensor) -> bool:
        """Whether the update writes the FP8 copies of a parameter."""
        return self._watch.has_copies(param)

    def check(self, scale: Tensor | None, max_norm: float | None) -> Verdict:
        """Read all gradients once; see `mezzo.optim._check.check`."""
        out = torch.empty(4, dtype=torch.float32, device=self.device)
        has_norm = max_norm is not None
        if has_norm and self._partial_sums is None:
            self._partial_sums = torch.empty(self._check_programs, dtype=torch.float64, device=self.device)
        try:
            self._launch_checks(out, scale, max_norm)
        except BaseException:  # also Ctrl-C, between two launches
            self._between_checks.zero_()  # programs that arrived must not count for the next check
            raise
        if not has_norm:
            return Verdict(out[0], out[1], packed=out)
        return Verdict(out[0], out[1], out[2], out[3], packed=out)

    def _launch_checks(self, out: Tensor, scale: Tensor | None, max_norm: float | None) -> None:
        has_norm = max_norm is not None
        first_program = 0
        for batch in self._batches:
            chunks = batch.check_chunks
            _triton_launch.launch(
                check_kernel,
                len(chunks),
                self.device,
                batch.table,
                chunks.rows,
                chunks.numbers,
                self._partial_sums if has_norm else out,
                self._between_checks,
                out,
                out if scale is None else scale,
                0.0 if max_norm is None else float(max_norm),
                self._check_programs,
                first_program,
                self._param_count,
                GRAD_DTYPE=DTYPES[batch.key.grad_dtype],
                HAS_SCALE=scale is not None,
                HAS_NORM=has_norm,
                ALIGNED=batch.key.aligned,
                BLOCK=CHECK_BLOCK,
                BLOCKS=CHECK_BLOCKS,
                warps=CHECK_WARPS,
            )
            first_program += len(chunks)

    def update(self, found: Tensor | None, scale: Tensor | None, clip: Tensor | None) -> None:
        """Take the step unless `found` says overflow.

        Masters, state, half and FP8 copies are written in one pass.
        """
        nothing = self._options.on_device
        for batch in self._batches:
            chunks = batch.update_chunks
            _triton_launch.launch(
                self._kernel,
                len(chunks),
                self.device,
                batch.table,
                chunks.rows,
                chunks.numbers,
                self._options.on_device,
                batch.between,
                nothing if found is None else found,
                nothing if scale is None else scale,
                nothing if clip is None else clip,
                batch.rows,
                len(chunks),
                HAS_FOUND=found is not None,
                HAS_SCALE=scale is not None,
                HAS_CLIP=clip is not None,
                **batch.options,
            )
        self._watch.note_update()


def _sort_by_launch(
    optimizer: Optimizer,
    groups: Sequence[Sequence[Slot]],
    options: Sequence[GroupOptions],
    state_dtype: torch.dtype,
) -> dict[LaunchKey, list[Member]]:
    """Return the parameters that have elements, by the launch that updates them.

    Missing state is created.
    """
    launches: dict[LaunchKey, list[Member]] = {}
    blocks = SGD_BLOCKS if type(optimizer) is SGD else ADAM_BLOCKS
    for number, (group, slots) in enumerate(zip(options, groups, strict=True)):
        for slot in slots:
            if not slot.target.numel():
                continue
            entry = PlanEntry(slot, _state_of(optimizer, slot, group, state_dtype))
            key = LaunchKey(
                grad_dtype=entry.grad.dtype,
                half_dtype=None if entry.target is entry.param else entry.param.dtype,
                switches=group.switches,
                aligned=entry.aligned,
                fp8=entry.copies is not None,
                compact=entry.target.dtype is REST_DTYPE,
                state_dtype=state_dtype,
                blocks=blocks,
            )
            launches.setdefault(key, []).append((number, entry))
    return launches


def _state_of(optimizer: Optimizer, slot: Slot, group: GroupOptions, dtype: torch.dtype) -> dict[str, Tensor]:
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    if type(optimizer) is SGD:
        keys = ("momentum_buffer",) if group.has_momentum else ()
    tensors = {key: _fused.state_tensor(optimizer, slot, key, dtype) for key in keys}
    counts = type(optimizer) is not SGD or (bool(keys) and dtype is not torch.float32)
    return {**tensors, "step": _fused.step_count(optimizer, slot)} if counts else tensors


class TritonStep:
    """The plans of one optimizer.

    The one in use first, then a few for other sets of parameters with gradients.
    """

    most_plans = 4

    def __init__(self, optimizer: Optimizer, state_dtype: torch.dtype) -> None:
        self._optimizer, self._state_dtype = optimizer, state_dtype
        self._plans: list[StepPlan] = []

    def prepare_plan(self) -> StepPlan | None:
        """Return a plan that is ready for the gradients as they are.

        None where Triton cannot take this step.
        """
        for plan in tuple(self._plans):
            readiness = plan.prepare()
            if readiness is not Readiness.OTHER_GRADS:
                self._plans.remove(plan)
            if readiness is Readiness.READY:
                self._plans.insert(0, plan)
                return plan
        groups = gather(self._optimizer)
        if not _is_covered(self._optimizer, groups):
            return None
        plan = StepPlan(self._optimizer, groups, self._state_dtype)
        if plan.prepare() is not Readiness.READY:
            raise AssertionError("a new plan is not ready")
        self._plans = [plan, *self._plans[: self.most_plans - 1]]
        return plan
