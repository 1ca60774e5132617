"""The step of SGD, Adam and AdamW in Triton: tables of addresses, kept between steps, and the launches."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from mezzo.optim import _fused
from mezzo.optim import _triton_table as columns
from mezzo.optim._check import Verdict
from mezzo.optim._compact import REST_DTYPE
from mezzo.optim._grads import Slot, gather, same_order
from mezzo.optim._triton_check import check_kernel, rescale_kernel
from mezzo.optim._triton_update import adam_kernel, sgd_kernel
from mezzo.optim._watch import Entry, Watch

_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_COLUMNS = columns.COLUMNS.value

#: Elements that a program works on at a time, how often, and its warps; found by trial on an H200. A program of Adam works more
#: often: it begins with two powers in float64.
BLOCK, SGD_BLOCKS, ADAM_BLOCKS, WARPS = 512, 2, 8, 4
CHECK_BLOCK, CHECK_BLOCKS, CHECK_WARPS = 2048, 16, 8
#: Where FP8 copies are written: rows and columns that a program works on at a time, how often (one below the other), its warps;
#: found by trial on an H200 (benchmarks/fp8_kernels.py).
FP8_ROWS, FP8_BLOCK, FP8_BLOCKS, FP8_WARPS = 32, 64, 8, 8


def _launch(kernel: Any, programs: int, device: torch.device, *args: Any, warps: int, **options: Any) -> None:
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, programs, torch.device("cuda", torch.cuda.current_device()), *args, warps=warps, **options)
            return
    kernel[(programs,)](*args, **options, num_warps=warps, enable_fp_fusion=False)


def _upload(values: Any, to: Tensor) -> None:
    """Send numbers to the device without waiting."""
    staged = torch.from_numpy(np.ascontiguousarray(values))
    to.copy_(staged.pin_memory() if to.device.type == "cuda" else staged, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What parameters must share to be updated by one launch."""

    grad_dtype: torch.dtype
    half_dtype: torch.dtype | None
    flags: tuple[tuple[str, bool], ...]
    """Compile-time switches of the optimizer's kernel."""
    aligned: bool
    fp8: bool
    """Whether FP8 copies are written: chunks are tiles then."""
    compact: bool
    """Whether masters are half weights and rests."""
    blocks: int
    """How often a program works, where its chunk is no tile."""

    @property
    def options(self) -> dict[str, Any]:
        """The kernel's options that are the same in every step."""
        return {
            "GRAD_DTYPE": _DTYPES[self.grad_dtype],
            "HALF_DTYPE": None if self.half_dtype is None else _DTYPES[self.half_dtype],
            "ALIGNED": self.aligned,
            "FP8": self.fp8,
            "COMPACT": self.compact,
            "ROWS": FP8_ROWS,
            "BLOCK": FP8_BLOCK if self.fp8 else BLOCK,
            "BLOCKS": FP8_BLOCKS if self.fp8 else self.blocks,
            "warps": FP8_WARPS if self.fp8 else WARPS,
            **dict(self.flags),
        }

    def count_chunks(self, shape: Sequence[int]) -> int:
        """Return how many programs update a tensor."""
        if not self.fp8:
            return -(-math.prod(shape) // (BLOCK * self.blocks))
        height, width = shape
        return -(-height // (FP8_ROWS * FP8_BLOCKS)) * -(-width // FP8_BLOCK)


@dataclass(slots=True)
class _Batch:
    """The chunks of one launch, and its rows of the table."""

    launch: _Launch
    rows: int
    options: dict[str, Any]
    update_chunks: tuple[Tensor, Tensor]
    check_chunks: tuple[Tensor, Tensor]
    table: Tensor
    between: Tensor


class Fit(enum.Enum):
    """Whether a plan is right for the optimizer as it is now."""

    NOW = enum.auto()
    OTHER_GRADS = enum.auto()
    """Not for these gradients; it may be again."""
    NEVER = enum.auto()
    """Something that it rests on is gone."""


@dataclass(slots=True)
class _Group:
    """A parameter group as numbers for the kernel and as switches."""

    numbers: tuple[float, ...]
    flags: tuple[tuple[str, bool], ...]
    lr_tensor: Tensor | None = None


def _read_group(group: dict[str, Any], kind: type[Optimizer]) -> _Group:
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    rate = 0.0 if on_device else float(lr)
    decay = group["weight_decay"]
    switches = {"DECAYS": bool(decay != 0), "MAXIMIZE": bool(group["maximize"])}
    numbers: tuple[float, ...]
    if kind is SGD:
        numbers = (rate, decay, group["momentum"], 1 - group["dampening"])
        switches |= {"HAS_MOMENTUM": bool(group["momentum"] != 0), "NESTEROV": bool(group["nesterov"])}
    else:
        beta1, beta2 = group["betas"]
        numbers = (rate, decay, 1 - beta1, beta2, 1 - beta2, group["eps"], _log(beta1), _log(beta2))
        switches["DECOUPLED"] = bool(group.get("decoupled_weight_decay", kind is AdamW))
    return _Group(numbers, tuple(sorted(switches.items())), lr if on_device else None)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _is_covered(optimizer: Optimizer, groups: Sequence[Sequence[Slot]]) -> bool:
    slots = [s for group in groups for s in group if s.target.numel()]
    if not slots or not _fused.covers(optimizer, groups) or len({id(s.param) for s in slots}) < len(slots):
        return False
    device = slots[0].target.device
    return all(
        s.is_plain
        and type(s.grad) is Tensor
        and not s.grad.is_neg()
        and s.target_here is s.target
        and s.kind[0] == device
        and s.kind[1] == torch.float32
        and s.grad.dtype in _DTYPES
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

    Made from the parameters as they are; `fit` says at each step whether they still are so. Gradients may be at other
    addresses each time: then the table is sent again.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Slot]]) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._groups = [_read_group(g, self._kind) for g in optimizer.param_groups]
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._group_sizes = [len(group["params"]) for group in optimizer.param_groups]
        with_grads = {s.index for slots in groups for s in slots if s.target.numel()}
        absent = [p for i, p in enumerate(self._params) if i not in with_grads]
        self._absent = [p for p in absent if p.numel()]
        self._empty = [p for p in absent if not p.numel()]
        self.device = next(s.target.device for slots in groups for s in slots if s.target.numel())
        launches: dict[_Launch, list[tuple[int, Entry]]] = {}
        for number, (group, slots) in enumerate(zip(self._groups, groups, strict=True)):
            for slot in slots:
                if slot.target.numel():
                    entry = self._entry(slot, group)
                    launches.setdefault(self._launch_of(entry, group), []).append((number, entry))
        members = [member for batch in launches.values() for member in batch]
        lr_tensors = [group.lr_tensor for group in self._groups if group.lr_tensor is not None]
        self._watch = Watch([entry for _, entry in members], lr_tensors)
        self._grads_at: list[int] = []
        self._host_table = self._fill_table(members)
        self._table = torch.empty(self._host_table.shape, dtype=torch.int64, device=self.device)
        self._options = torch.empty((len(self._groups), columns.OPTIONS.value), dtype=torch.float64, device=self.device)
        self._between = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._kept_for_replay: list[Tensor] = []
        self._is_sent_by_graph = False
        self._staged = self._pinned_table()
        self._send_options()
        self._batches: list[_Batch] = []
        first_row = 0
        for launch, batch in launches.items():
            self._batches.append(self._batch(launch, [entry for _, entry in batch], first_row))
            first_row += len(batch)
        self._check_programs = sum(len(batch.check_chunks[0]) for batch in self._batches)
        self._partial_sums: Tensor | None = None
        self._count = len(self._params)

    # Making it

    def _entry(self, slot: Slot, group: _Group) -> Entry:
        optimizer = self._optimizer
        tensors: dict[str, Tensor] = {}
        if self._kind is SGD:
            if dict(group.flags)["HAS_MOMENTUM"]:
                tensors["momentum_buffer"] = _fused.state_tensor(optimizer, slot, "momentum_buffer")
        else:
            tensors = {key: _fused.state_tensor(optimizer, slot, key) for key in ("exp_avg", "exp_avg_sq")}
            tensors["step"] = _fused.step_count(optimizer, slot)
        return Entry(slot, tensors)

    def _launch_of(self, entry: Entry, group: _Group) -> _Launch:
        return _Launch(
            grad_dtype=entry.grad.dtype,
            half_dtype=None if entry.target is entry.param else entry.param.dtype,
            flags=group.flags,
            aligned=entry.aligned,
            fp8=entry.copies is not None,
            compact=entry.target.dtype is REST_DTYPE,
            blocks=SGD_BLOCKS if self._kind is SGD else ADAM_BLOCKS,
        )

    def _fill_table(self, members: Sequence[tuple[int, Entry]]) -> Any:
        table = np.zeros((len(members), _COLUMNS), dtype=np.int64)
        for row, (number, entry) in zip(table, members, strict=True):
            has_master = entry.target is not entry.param
            moments = [t.data_ptr() for key, t in entry.tensors.items() if key != "step"]
            lr = self._groups[number].lr_tensor
            row[columns.TARGET.value] = entry.target.data_ptr()
            row[columns.HALF.value] = entry.param.data_ptr() if has_master else 0
            row[columns.STATE_A.value : columns.STATE_A.value + len(moments)] = moments
            row[columns.STEP.value] = entry.tensors["step"].data_ptr() if "step" in entry.tensors else 0
            row[columns.LR.value] = 0 if lr is None else lr.data_ptr()
            row[columns.NUMEL.value] = entry.target.numel()
            row[columns.GROUP.value] = number
            row[columns.INDEX.value] = entry.index
            if entry.copies is not None:
                row[columns.WIDTH.value] = entry.target.shape[1]
                row[columns.VALUES.value] = entry.copies.values.data_ptr()
                row[columns.TRANSPOSED.value] = entry.copies.transposed.data_ptr()
                row[columns.COPY_STATE.value] = entry.copies.state.data_ptr()
        return table

    def _batch(self, launch: _Launch, entries: Sequence[Entry], first_row: int) -> _Batch:
        numels = np.array([entry.target.numel() for entry in entries])
        return _Batch(
            launch=launch,
            rows=len(entries),
            options=launch.options,
            update_chunks=self._chunks(np.array([launch.count_chunks(entry.target.shape) for entry in entries])),
            check_chunks=self._chunks(-(-numels // (CHECK_BLOCK * CHECK_BLOCKS))),
            table=self._table[first_row:],
            between=torch.zeros(1, dtype=torch.int32, device=self.device),
        )

    def _chunks(self, counts: Any) -> tuple[Tensor, Tensor]:
        """Return, per program, the row of its tensor and the number of its chunk; `counts` is how many a tensor has."""
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        both = torch.empty((2, len(rows)), dtype=torch.int32, device=self.device)
        _upload(np.stack([rows, numbers.astype(np.int32)]), both)
        return both[0], both[1]

    def _pinned_table(self) -> Tensor | None:
        """Return host memory for a table that a CUDA graph copies; made before, a capture had better not allocate."""
        if self.device.type != "cuda":
            return None
        return torch.empty(self._host_table.shape, dtype=torch.int64, pin_memory=True)

    def _send_options(self) -> None:
        numbers = np.zeros(self._options.shape)
        for row, group in zip(numbers, self._groups, strict=True):
            row[: len(group.numbers)] = group.numbers
        _upload(numbers, self._options)

    # Using it again

    def fit(self) -> Fit:
        """Say whether the plan is right for the optimizer as it is; if so, send what changed: gradients, options."""
        if not self.holds():
            return Fit.NEVER
        if any([p.grad is not None for p in self._absent]):
            return Fit.OTHER_GRADS
        grads_at = self._watch.grads_at()
        if grads_at is None:
            return Fit.OTHER_GRADS
        # A graph sends its addresses itself, once; what a replay left in the table is not ours.
        is_captured = self._is_captured()
        must_send = not self._is_sent_by_graph if is_captured else bool(self._kept_for_replay)
        if must_send or grads_at != self._grads_at:
            self._send_grads(grads_at, is_captured)
        self._is_sent_by_graph = is_captured
        return Fit.NOW

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def holds(self) -> bool:
        """Whether all but the gradients is as it was; numbers of the parameter groups are sent where they changed."""
        groups = self._optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        if [len(group["params"]) for group in groups] != self._group_sizes:
            return False
        if not all([a is b for a, b in zip(params, self._params, strict=True)]) or any(
            [p.numel() for p in self._empty]
        ):
            return False
        return self._follow_options(groups) and self._watch.holds(self._optimizer.state)

    def writes_copies_of(self, param: Tensor) -> bool:
        """Whether the update writes the FP8 copies of a parameter."""
        return self._watch.has_copies(param)

    def _follow_options(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        if not all([_fused.covers_options(group) for group in param_groups]):
            return False
        groups = [_read_group(group, self._kind) for group in param_groups]
        changed = False
        for old, new in zip(self._groups, groups, strict=True):
            if old.flags != new.flags or old.lr_tensor is not new.lr_tensor:
                return False
            changed |= old.numbers != new.numbers
        if changed:
            if self._is_captured():
                raise RuntimeError("the optimizer's options changed since its last step: take one before capturing it")
            self._groups = groups
            self._send_options()
        return True

    def _send_grads(self, grads_at: list[int], is_captured: bool) -> None:
        self._grads_at = grads_at
        self._host_table[:, columns.GRAD.value] = grads_at
        if not is_captured:
            _upload(self._host_table, self._table)
            if self._staged is None:
                self._staged = self._pinned_table()
            return
        # A replay copies from the same memory again: it must stay, and stay as it is.
        if self._staged is None:
            raise RuntimeError(
                "an optimizer's step can be captured once, and again after an eager step: take one between two captures"
            )
        staged, self._staged = self._staged, None
        staged.copy_(torch.from_numpy(self._host_table))
        self._kept_for_replay.append(staged)
        self._table.copy_(staged, non_blocking=True)

    # The launches

    def check(self, scale: Tensor | None, max_norm: float | None) -> Verdict:
        """Look at all gradients; see `mezzo.optim._check.check`."""
        out = torch.empty(4, dtype=torch.float32, device=self.device)
        has_norm = max_norm is not None
        if has_norm and self._partial_sums is None:
            self._partial_sums = torch.empty(self._check_programs, dtype=torch.float64, device=self.device)
        try:
            self._launch_checks(out, scale, max_norm)
        except BaseException:  # also Ctrl-C, between two launches
            self._between.zero_()  # programs that arrived must not count for the next check
            raise
        if not has_norm:
            return Verdict(out[0], out[1], packed=out)
        return Verdict(out[0], out[1], out[2], out[3], packed=out)

    def _launch_checks(self, out: Tensor, scale: Tensor | None, max_norm: float | None) -> None:
        has_norm = max_norm is not None
        first_program = 0
        for batch in self._batches:
            rows, numbers = batch.check_chunks
            _launch(
                check_kernel,
                len(rows),
                self.device,
                batch.table,
                rows,
                numbers,
                self._partial_sums if has_norm else out,
                self._between,
                out,
                out if scale is None else scale,
                0.0 if max_norm is None else float(max_norm),
                self._check_programs,
                first_program,
                self._count,
                GRAD_DTYPE=_DTYPES[batch.launch.grad_dtype],
                HAS_SCALE=scale is not None,
                HAS_NORM=has_norm,
                ALIGNED=batch.launch.aligned,
                BLOCK=CHECK_BLOCK,
                BLOCKS=CHECK_BLOCKS,
                warps=CHECK_WARPS,
            )
            first_program += len(rows)

    def update(self, found: Tensor | None, scale: Tensor | None, clip: Tensor | None) -> None:
        """Take the step unless `found` says overflow; masters, state, half and FP8 copies are written in one pass."""
        nothing = self._options
        for batch in self._batches:
            rows, numbers = batch.update_chunks
            _launch(
                sgd_kernel if self._kind is SGD else adam_kernel,
                len(rows),
                self.device,
                batch.table,
                rows,
                numbers,
                self._options,
                batch.between,
                nothing if found is None else found,
                nothing if scale is None else scale,
                nothing if clip is None else clip,
                batch.rows,
                len(rows),
                HAS_FOUND=found is not None,
                HAS_SCALE=scale is not None,
                HAS_CLIP=clip is not None,
                **batch.options,
            )
        self._watch.note_update()  # the kernels wrote behind torch's back


class TritonStep:
    """The plans of one optimizer: the one in use first, a few for the sets of parameters it alternates with."""

    most_plans = 4

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._plans: list[StepPlan] = []

    def plan(self) -> StepPlan | None:
        """Return a plan for the gradients as they are; None where Triton cannot take this step."""
        for plan in tuple(self._plans):
            fit = plan.fit()
            if fit is not Fit.OTHER_GRADS:
                self._plans.remove(plan)
            if fit is Fit.NOW:
                self._plans.insert(0, plan)
                return plan
        groups = gather(self._optimizer)
        if not _is_covered(self._optimizer, groups):
            return None
        plan = StepPlan(self._optimizer, groups)
        if plan.fit() is not Fit.NOW:
            raise AssertionError("a plan just made does not fit")
        self._plans = [plan, *self._plans[: self.most_plans - 1]]
        return plan


def rescale(verdict: Tensor, scale: Tensor, counts: Tensor, rule: Any, dynamic: bool) -> Tensor:
    """Advance the loss-scaling state machine in one launch; see `mezzo.optim.rescale`."""
    report = torch.empty(4, dtype=torch.float32, device=scale.device)
    _launch(
        rescale_kernel,
        1,
        scale.device,
        verdict,
        scale,
        counts,
        report,
        rule.incr_ratio,
        rule.decr_ratio,
        rule.min_loss_scaling,
        rule.incr_every_n_steps,
        rule.decr_every_n_nan_or_inf,
        DYNAMIC=dynamic,
        warps=1,
    )
    return report
