"""The float32 master of a half parameter: where it lives and how it notices edits from outside.

Beside the parameter is kept either the master itself or, if it is compact, the 16 bits that the half value lacks of it
(`mezzo.optim._compact`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._torch.foreach import foreach_copy_
from mezzo._torch.parameters import MASTER_ATTRIBUTE, wrap_parameter_copies
from mezzo.dtypes import HALF_DTYPES
from mezzo.fp8 import drop_copies, renew_copies
from mezzo.optim._compact import REST_DTYPE, join, split
from mezzo.optim._shards import is_dtensor


class _Record:
    """What is kept of one master, and what its parameter looked like when both last agreed."""

    __slots__ = ("data_ptr", "device", "half", "stored", "version")

    def __init__(self, kept: Tensor, half: torch.dtype = torch.float16) -> None:
        self.stored = kept
        """float32: the master; int16: the rest of it."""
        self.half = half
        self.version: int | None = None  # None: not seen yet, what the parameter shows first is in agreement
        self.data_ptr = 0
        self.device = kept.device

    @property
    def is_compact(self) -> bool:
        return self.stored.dtype is REST_DTYPE

    def note(self, param: Tensor) -> None:
        self.version, self.data_ptr, self.device = param._version, param.data_ptr(), param.device
        self.half = param.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # Version and address mean nothing in another process.
        return _Record, (self.stored, self.half)


# A saved parameter carries its record, which holds a tensor and nothing else: torch.load(weights_only=True) may make it.
torch.serialization.add_safe_globals([_Record])


def is_half(param: Tensor) -> bool:
    """Whether a tensor is float16 or bfloat16."""
    return param.dtype in HALF_DTYPES


def attach_master(param: Tensor, fp32_tensor: Tensor | None = None, *, compact: bool = False) -> Tensor:
    """Give a half parameter its master; return what is kept of it, the master itself if it is not compact.

    Args:
        param: A float16 or bfloat16 parameter. Tied parameters are one object and so have one master.
        fp32_tensor: The float32 value, None: that of the parameter; copied only where its layout or device differs.
        compact: Keep what the half value lacks of it, in two bytes a number, instead; the parameter is written where another
            value than its own is given.

    Raises:
        ValueError: `param` is not half, the shapes differ, or a DTensor is to have a compact master.
    """
    if not is_half(param):
        raise ValueError(f"only a float16 or bfloat16 parameter has a master; this one is {param.dtype}")
    if fp32_tensor is not None and fp32_tensor.shape != param.shape:
        raise ValueError(f"the master is {tuple(fp32_tensor.shape)}, its parameter {tuple(param.shape)}")
    if compact and is_dtensor(param):
        raise ValueError("the master of a DTensor must be a whole one, not a compact one")
    copy_masters_with_parameters()
    with torch.no_grad():
        if not compact:
            kept = _in_layout_of(param, param if fp32_tensor is None else fp32_tensor, torch.float32)
        elif fp32_tensor is None:
            kept = torch.zeros_like(param, dtype=REST_DTYPE, requires_grad=False)
        else:
            half, rest = split(fp32_tensor.detach().to(param.device, torch.float32), param.dtype)
            kept = _in_layout_of(param, rest, REST_DTYPE)
            param.copy_(half)
    setattr(param, MASTER_ATTRIBUTE, _Record(kept))
    mark_in_sync([param])
    return kept


@functools.cache
def copy_masters_with_parameters() -> None:
    """Let `copy.deepcopy` of a parameter copy its master; torch drops what is attached to one. Once a process."""
    wrap_parameter_copies(_with_master)


def _with_master(copy_parameter: Callable[..., Any]) -> Callable[..., Any]:
    def copy_with_master(param: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(param) not in memo
        kept = stored_master(param)  # first: the parameter may get bits back
        result = copy_parameter(param, memo)
        if is_new and kept is not None:
            setattr(result, MASTER_ATTRIBUTE, _Record(kept.clone()))
            mark_in_sync([result])
        return result

    return copy_with_master


def master_record(param: Tensor) -> _Record | None:
    """Return the record of a parameter's master as it stands; None where it has none."""
    return getattr(param, MASTER_ATTRIBUTE, None)


def master_of(param: Tensor) -> Tensor | None:
    """Return the float32 master of a parameter, or None where it has none.

    A half parameter that was edited since (in place, by `load_state_dict`, by `param.data = x`) is the newer one: its
    master takes over what changed. A move to another device carries the master along. `param.data.copy_(x)` leaves no trace
    that torch shows; call `refresh_master` after it.

    A compact master is computed at each call: what is written into it counts after `publish`.
    """
    kept = stored_master(param)
    return kept if kept is None or kept.dtype is not REST_DTYPE else join(param.detach(), kept)


def stored_master(param: Tensor) -> Tensor | None:
    """Return what is kept of a parameter's master: the master, or the rest of a compact one; None where it has none."""
    record = master_record(param)
    if record is None:
        return None
    if record.version == param._version and record.data_ptr == param.data_ptr() and record.half is param.dtype:
        return record.stored
    return _follow(param, record)


def _follow(param: Tensor, record: _Record) -> Tensor | None:
    if not is_half(param):  # model.float(): the parameter is its own master again, with the bits that it had
        if param.dtype == torch.float32 and param.shape == record.stored.shape:
            with torch.no_grad():
                _give_bits_back(
                    param, record, record.stored.to(param.device)
                )  # to("cpu", torch.float32) is both at once
        detach_master(param)
        return None
    moved = record.version == param._version and record.device != param.device
    of_other_dtype = record.is_compact and record.half is not param.dtype
    if (record.version is None or moved) and not of_other_dtype:
        record.stored = _in_layout_of(param, record.stored, record.stored.dtype)
        record.note(param)
        return record.stored
    return _take_over_edit(param, record)


def _give_bits_back(param: Tensor, record: _Record, kept: Tensor) -> None:
    """Write a master into its parameter, which is float32 now; elements that were edited stay as they are."""
    if not record.is_compact:
        param.copy_(torch.where(kept.to(record.half).float() == param, kept, param))
    elif record.version in (None, param._version):  # else no element is known to be what its rest belongs to
        half = param.to(record.half)
        param.copy_(torch.where(half.float() == param, join(half, kept), param))


def _take_over_edit(param: Tensor, record: _Record) -> Tensor | None:
    """Bring the elements that were changed into the master; those that still are its rounded value keep all their bits.

    So a copy of a weight onto itself, which is what wrapping a model for distributed training does in one process, loses
    nothing. With several ranks the whole half value is taken instead: every rank then has the same master, also where
    only the half weights were sent round. Of a compact master nobody knows which elements were changed.
    """
    elsewhere = record.stored.shape != param.shape or record.stored.device != param.device
    if elsewhere or record.is_compact or has_several_ranks():
        return refresh_master(param)
    with torch.no_grad():
        kept = record.stored.to(param.dtype) == param
        right = torch.where(kept, record.stored, param.float())
        if record.stored.stride() == param.stride():
            record.stored.copy_(right)  # where it is: a captured step knows its address
        else:
            record.stored = _in_layout_of(param, right, torch.float32)
    record.note(param)
    return record.stored


def has_several_ranks() -> bool:
    """Whether this process is one of several in a torch.distributed group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refresh_master(param: Tensor) -> Tensor | None:
    """Make the half value the master, the call to make after `param.data.copy_(x)`; return what is kept of it."""
    record = master_record(param)
    if record is None:
        return None
    same_place = record.stored.shape == param.shape and record.stored.device == param.device
    with torch.no_grad():
        if not same_place or record.stored.stride() != param.stride():
            record.stored = torch.empty_like(param, dtype=record.stored.dtype, requires_grad=False)
        if record.is_compact:
            record.stored.zero_()
        else:
            record.stored.copy_(param)
    record.note(param)
    renew_copies([param])
    return record.stored


def detach_master(param: Tensor) -> None:
    """Forget the master of a parameter, if it has one."""
    if hasattr(param, MASTER_ATTRIBUTE):
        delattr(param, MASTER_ATTRIBUTE)
        drop_copies(param)


def publish(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write float32 values into half parameters and what is kept of their masters, and note that both agree."""
    together: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for param, master in zip(params, masters, strict=True):
            record: _Record = getattr(param, MASTER_ATTRIBUTE)
            if record.is_compact:  # one by one: the parts of all of them would be as much as the masters
                half, rest = split(master.to(param.device, torch.float32), param.dtype)
                param.copy_(half)
                record.stored.copy_(rest)
                continue
            for target in (param, record.stored):
                if target is master:
                    continue
                if is_dtensor(target):
                    target.copy_(master)
                else:
                    together.append((target, master))
        copy_all([target for target, _ in together], [master for _, master in together])
    mark_in_sync(params)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others by one call for each dtype: some versions of torch take that of the first target for all."""
    by_dtype: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        for column, tensor in zip(by_dtype[target.dtype], (target, source), strict=True):
            column.append(tensor)
    for columns in by_dtype.values():
        foreach_copy_(*columns)


def float32_like(kept: Tensor) -> Tensor:
    """Return a float32 tensor like what is kept of a master, for when its values are not asked for."""
    if kept.dtype is not REST_DTYPE:
        return kept
    return kept.new_empty((), dtype=torch.float32).expand(kept.shape)


def mark_in_sync(params: Sequence[Tensor]) -> None:
    """Note that half parameters and what is kept of their masters belong together as they are."""
    for param in params:
        getattr(param, MASTER_ATTRIBUTE).note(param)


def _in_layout_of(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` detached, in `dtype`, with the device and strides of `param`; itself where it already is."""
    value = value.detach()
    like = torch.empty_like(param, dtype=dtype, requires_grad=False)
    if value.dtype == dtype and value.device == like.device and value.stride() == like.stride():
        return value
    return like.copy_(value)
