"""The float32 master of a half parameter: where it lives and how it notices edits from outside.

Beside the parameter is kept either the master itself or, if it is compact, the 16 bits that the half value lacks of it
(`mezzo.optim._compact`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.fp8 import renew_copies
from mezzo.fp8._weights import MASTER_HOME, drop_copies
from mezzo.optim._compact import REST_DTYPE, join, split

HALF_DTYPES = (torch.float16, torch.bfloat16)


class _Record:
    """What is kept of one master, and what its parameter looked like when both last agreed."""

    __slots__ = ("data_ptr", "device", "half", "kept", "version")

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept
        """float32: the master; int16: the rest of it."""
        self.version: int | None = None  # None: not seen yet, whatever the parameter shows first is in agreement
        self.data_ptr = 0
        self.device = kept.device
        self.half = torch.float16

    @property
    def is_compact(self) -> bool:
        return self.kept.dtype is REST_DTYPE

    def note(self, param: Tensor) -> None:
        self.version, self.data_ptr, self.device = param._version, param.data_ptr(), param.device
        self.half = param.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # Version and address mean nothing in another process.
        return _Record, (self.kept,)


# A saved parameter carries its record, which holds a tensor and nothing else: torch.load(weights_only=True) may make it.
torch.serialization.add_safe_globals([_Record])


def is_half(param: Tensor) -> bool:
    """Whether a tensor is float16 or bfloat16."""
    return param.dtype in HALF_DTYPES


def attach_master(param: Tensor, fp32_tensor: Tensor, *, compact: bool = False) -> Tensor:
    """Give a half parameter its master; return what is kept of it, the master itself if it is not compact.

    Args:
        param: A float16 or bfloat16 parameter. Tied parameters are one object and so have one master.
        fp32_tensor: The float32 value; copied only where its layout or device differs from the parameter's.
        compact: Keep what the half value lacks of it, in two bytes a number, instead; the parameter is written then.

    Raises:
        ValueError: `param` is not half, or the shapes differ.
    """
    if not is_half(param):
        raise ValueError(f"only a float16 or bfloat16 parameter has a master; this one is {param.dtype}")
    if fp32_tensor.shape != param.shape:
        raise ValueError(f"the master is {tuple(fp32_tensor.shape)}, its parameter {tuple(param.shape)}")
    _copy_masters_with_parameters()
    if compact:
        setattr(param, MASTER_HOME, _Record(_in_layout_of(param, fp32_tensor.new_empty(0), REST_DTYPE)))
        publish([param], [fp32_tensor.detach()])
    else:
        setattr(param, MASTER_HOME, _Record(_in_layout_of(param, fp32_tensor, torch.float32)))
        agree([param])
    kept: Tensor = getattr(param, MASTER_HOME).kept
    return kept


@functools.cache
def _copy_masters_with_parameters() -> None:
    """Let `copy.deepcopy` of a parameter copy its master; torch drops what is attached to one. Once a process."""
    copy_parameter: Callable[..., Any] = nn.Parameter.__deepcopy__

    def copy_with_master(param: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(param) not in memo
        result = copy_parameter(param, memo)
        kept = kept_of(param)
        if is_new and kept is not None:
            setattr(result, MASTER_HOME, _Record(kept.clone()))
            agree([result])
        return result

    nn.Parameter.__deepcopy__ = copy_with_master  # type: ignore[method-assign, assignment]


def record_of(param: Tensor) -> _Record | None:
    """Return the record of a parameter's master as it stands; None where it has none."""
    return getattr(param, MASTER_HOME, None)


def master_of(param: Tensor) -> Tensor | None:
    """Return the float32 master of a parameter, or None where it has none.

    A half parameter that was edited since (in place, by `load_state_dict`, by `param.data = x`) is the newer one: its
    master takes over what changed. A move to another device carries the master along. `param.data.copy_(x)` leaves no trace
    that torch shows; call `refresh_master` after it.

    A compact master is computed at each call: what is written into it counts after `publish`.
    """
    kept = kept_of(param)
    return kept if kept is None or kept.dtype is not REST_DTYPE else join(param.detach(), kept)


def kept_of(param: Tensor) -> Tensor | None:
    """Return what is kept of a parameter's master: the master, or the rest of a compact one; None where it has none."""
    record = record_of(param)
    if record is None:
        return None
    if record.version == param._version and record.data_ptr == param.data_ptr():
        return record.kept
    return _follow(param, record)


def _follow(param: Tensor, record: _Record) -> Tensor | None:
    if not is_half(param):  # model.float(): the parameter is its own master again, with the bits that it had
        if param.dtype == torch.float32 and param.shape == record.kept.shape:
            with torch.no_grad():
                kept = record.kept.to(param.device)  # model.to("cpu", torch.float32) is both at once
                half = param.to(record.half)
                master = join(half, kept) if record.is_compact else kept
                still_its_own = half.float() == param if record.is_compact else master.to(record.half).float() == param
                param.copy_(torch.where(still_its_own, master, param))
        detach_master(param)
        return None
    moved = record.version == param._version and record.device != param.device
    if record.is_compact and record.half != param.dtype:
        moved = False  # the rest is that of the other half dtype
    if record.version is None or moved:
        record.kept = _in_layout_of(param, record.kept, record.kept.dtype)
        record.note(param)
        return record.kept
    return _take_over_edit(param, record)


def _take_over_edit(param: Tensor, record: _Record) -> Tensor | None:
    """Bring the elements that were changed into the master; those that still are its rounded value keep all their bits.

    So a copy of a weight onto itself, which is what wrapping a model for distributed training does in one process, loses
    nothing. With several ranks the whole half value is taken instead: every rank then has the same master, also where
    only the half weights were sent round. Of a compact master nobody knows which elements were changed.
    """
    elsewhere = record.kept.shape != param.shape or record.kept.device != param.device
    if elsewhere or record.is_compact or _has_several_ranks():
        return refresh_master(param)
    with torch.no_grad():
        kept = record.kept.to(param.dtype) == param
        right = torch.where(kept, record.kept, param.float())
        if record.kept.stride() == param.stride():
            record.kept.copy_(right)  # where it is: a captured step knows its address
        else:
            record.kept = _in_layout_of(param, right, torch.float32)
    record.note(param)
    return record.kept


def _has_several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refresh_master(param: Tensor) -> Tensor | None:
    """Make the half value the master, the call to make after `param.data.copy_(x)`; return what is kept of it."""
    record = record_of(param)
    if record is None:
        return None
    _make_room(param, record)
    with torch.no_grad():
        if record.is_compact:
            record.kept.zero_()
        else:
            record.kept.copy_(param)
    record.note(param)
    renew_copies([param])
    return record.kept


def set_master(param: Tensor, value: Tensor) -> None:
    """Make a float32 value the master of a parameter that has one, and its half value; shapes must be the same."""
    _make_room(param, getattr(param, MASTER_HOME))
    publish([param], [value])
    renew_copies([param])


def _make_room(param: Tensor, record: _Record) -> None:
    """Keep a master where its parameter is, in its layout; where it already is so: a captured step knows its address."""
    same_place = record.kept.shape == param.shape and record.kept.device == param.device
    if not same_place or record.kept.stride() != param.stride():
        record.kept = _in_layout_of(param, record.kept.new_empty(0), record.kept.dtype)


def detach_master(param: Tensor) -> None:
    """Forget the master of a parameter, if it has one."""
    if hasattr(param, MASTER_HOME):
        delattr(param, MASTER_HOME)
        drop_copies(param)


def publish(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write float32 values into half parameters and what is kept of their masters, and note that both agree."""
    if not params:
        return
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for param, master in zip(params, masters, strict=True):
        record: _Record = getattr(param, MASTER_HOME)
        if record.is_compact:
            half, rest = split(master.to(param.device, torch.float32), param.dtype)
            targets += (param, record.kept)
            values += (half, rest)
            continue
        targets.append(param)
        values.append(master)
        if record.kept is not master:
            targets.append(record.kept)
            values.append(master)
    with torch.no_grad():
        torch._foreach_copy_(targets, values)
    agree(params)


def float32_like(kept: Tensor) -> Tensor:
    """Return a float32 tensor on the device of what is kept of a master, for when its values are not asked for."""
    return kept if kept.dtype is not REST_DTYPE else kept.new_empty(0, dtype=torch.float32)


def agree(params: Sequence[Tensor]) -> None:
    """Note that half parameters and what is kept of their masters belong together as they are."""
    for param in params:
        getattr(param, MASTER_HOME).note(param)


def _in_layout_of(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` detached, in `dtype`, with the device and strides of `param`; itself where it already is.

    An empty value stands for one that will be written.
    """
    value = value.detach()
    like = torch.empty_like(param, dtype=dtype, requires_grad=False)
    if (
        value.dtype == dtype
        and value.shape == like.shape
        and value.device == like.device
        and value.stride() == like.stride()
    ):
        return value
    return like.copy_(value) if value.numel() else like
