"""The float32 master of a half parameter: where it lives and how it notices edits from outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.fp8 import renew_copies
from mezzo.fp8._weights import MASTER_HOME, drop_copies

HALF_DTYPES = (torch.float16, torch.bfloat16)


class _Record:
    """One master and what its parameter looked like when both last agreed."""

    __slots__ = ("data_ptr", "device", "half", "master", "version")

    def __init__(self, master: Tensor) -> None:
        self.master = master
        self.version: int | None = None  # None: not seen yet, whatever the parameter shows first is in agreement
        self.data_ptr = 0
        self.device = master.device
        self.half = torch.float16

    def note(self, param: Tensor) -> None:
        self.version, self.data_ptr, self.device = param._version, param.data_ptr(), param.device
        self.half = param.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # Version and address mean nothing in another process.
        return _Record, (self.master,)


# A saved parameter carries its record, which holds a tensor and nothing else: torch.load(weights_only=True) may make it.
torch.serialization.add_safe_globals([_Record])


def is_half(param: Tensor) -> bool:
    """Whether a tensor is float16 or bfloat16."""
    return param.dtype in HALF_DTYPES


def attach_master(param: Tensor, fp32_tensor: Tensor) -> Tensor:
    """Give a half parameter its master and return it.

    Args:
        param: A float16 or bfloat16 parameter. Tied parameters are one object and so have one master.
        fp32_tensor: The float32 value; copied only where its layout or device differs from the parameter's.

    Raises:
        ValueError: `param` is not half, or the shapes differ.
    """
    if not is_half(param):
        raise ValueError(f"only a float16 or bfloat16 parameter has a master; this one is {param.dtype}")
    if fp32_tensor.shape != param.shape:
        raise ValueError(f"the master is {tuple(fp32_tensor.shape)}, its parameter {tuple(param.shape)}")
    _copy_masters_with_parameters()
    record = _Record(_in_layout_of(param, fp32_tensor))
    record.note(param)
    setattr(param, MASTER_HOME, record)
    return record.master


@functools.cache
def _copy_masters_with_parameters() -> None:
    """Let `copy.deepcopy` of a parameter copy its master; torch drops what is attached to one. Once a process."""
    copy_parameter: Callable[..., Any] = nn.Parameter.__deepcopy__

    def copy_with_master(param: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(param) not in memo
        result = copy_parameter(param, memo)
        master = master_of(param)
        if is_new and master is not None:
            attach_master(result, master.clone())
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
    """
    record = record_of(param)
    if record is None:
        return None
    if record.version == param._version and record.data_ptr == param.data_ptr():
        return record.master
    return _follow(param, record)


def _follow(param: Tensor, record: _Record) -> Tensor | None:
    if not is_half(param):  # model.float(): the parameter is its own master again, with the bits that it had
        if param.dtype == torch.float32 and param.shape == record.master.shape:
            with torch.no_grad():
                master = record.master.to(param.device)  # model.to("cpu", torch.float32) is both at once
                param.copy_(torch.where(master.to(record.half).float() == param, master, param))
        detach_master(param)
        return None
    edited = record.version is not None and record.version != param._version
    if record.version is None or (not edited and record.device != param.device):
        record.master = _in_layout_of(param, record.master)
        record.note(param)
        return record.master
    return _take_over_edit(param, record)


def _take_over_edit(param: Tensor, record: _Record) -> Tensor | None:
    """Bring the elements that were changed into the master; those that still are its rounded value keep all their bits.

    So a copy of a weight onto itself, which is what wrapping a model for distributed training does in one process, loses
    nothing. With several ranks the whole half value is taken instead: every rank then has the same master, also where
    only the half weights were sent round.
    """
    if _has_several_ranks() or record.master.shape != param.shape or record.master.device != param.device:
        return refresh_master(param)
    with torch.no_grad():
        kept = record.master.to(param.dtype) == param
        right = torch.where(kept, record.master, param.float())
        if record.master.stride() == param.stride():
            record.master.copy_(right)  # where it is: a captured step knows its address
        else:
            record.master = _in_layout_of(param, right)
    record.note(param)
    return record.master


def _has_several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refresh_master(param: Tensor) -> Tensor | None:
    """Overwrite the master with the half value, the call to make after `param.data.copy_(x)`; return the master."""
    record = record_of(param)
    if record is None:
        return None
    same_place = record.master.shape == param.shape and record.master.device == param.device
    with torch.no_grad():
        if same_place and record.master.stride() == param.stride():
            record.master.copy_(param)
        else:
            record.master = _in_layout_of(param, param.detach())
    record.note(param)
    renew_copies([param])
    return record.master


def detach_master(param: Tensor) -> None:
    """Forget the master of a parameter, if it has one."""
    if hasattr(param, MASTER_HOME):
        delattr(param, MASTER_HOME)
        drop_copies(param)


def publish(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write masters into their half parameters and note that both agree."""
    if not params:
        return
    with torch.no_grad():
        torch._foreach_copy_(list(params), list(masters))
    for param in params:
        getattr(param, MASTER_HOME).note(param)


def _in_layout_of(param: Tensor, value: Tensor) -> Tensor:
    """Return `value` detached, float32, with the device and strides of `param`; itself where it already is."""
    value = value.detach()
    like = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
    if value.dtype == torch.float32 and value.device == like.device and value.stride() == like.stride():
        return value
    return like.copy_(value)
