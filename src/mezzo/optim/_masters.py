"""The float32 master of a half parameter.

Where it is stored, and how it follows edits of the parameter.

The parameter stores either the master itself or, for a compact master, the 16 bits that the half
value lacks (`mezzo.optim._compact`).
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
    """A stored master, and the state of its parameter when both last agreed."""

    __slots__ = ("data_ptr", "device", "half", "stored", "version")

    def __init__(self, stored: Tensor, half: torch.dtype = torch.float16) -> None:
        self.stored = stored
        """float32: the master; int16: the rest of a compact one."""
        self.half = half
        self.version: int | None = None  # None: not compared yet; the parameter is taken to agree
        self.data_ptr = 0
        self.device = stored.device

    @property
    def is_compact(self) -> bool:
        return self.stored.dtype is REST_DTYPE

    def note(self, param: Tensor) -> None:
        self.version, self.data_ptr, self.device = param._version, param.data_ptr(), param.device
        self.half = param.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # Version and address mean nothing in another process.
        return _Record, (self.stored, self.half)


# A saved parameter contains its record: torch.load(weights_only=True) must be allowed to create it.
torch.serialization.add_safe_globals([_Record])


def is_half(param: Tensor) -> bool:
    """Whether a tensor is float16 or bfloat16."""
    return param.dtype in HALF_DTYPES


def attach_master(param: Tensor, fp32_tensor: Tensor | None = None, *, compact: bool = False) -> Tensor:
    """Give a half parameter a master.

    Return what is stored: the master, or the rest of a compact one.

    Args:
        param: A float16 or bfloat16 parameter. Tied parameters are one object and so have one
            master.
        fp32_tensor: The float32 value; None: that of the parameter. Copied only if its layout or
            device differs.
        compact: Store only the 16 bits that the half value lacks. If `fp32_tensor` is given, the
            parameter is rewritten from it.

    Raises:
        ValueError: `param` is not half, the shapes differ, or a DTensor is to have a compact
            master.
    """
    if not is_half(param):
        raise ValueError(f"only a float16 or bfloat16 parameter can have a master; this one is {param.dtype}")
    if fp32_tensor is not None and fp32_tensor.shape != param.shape:
        raise ValueError(f"the master is {tuple(fp32_tensor.shape)}, its parameter {tuple(param.shape)}")
    if compact and is_dtensor(param):
        raise ValueError("a DTensor cannot have a compact master; give it a full one")
    copy_masters_with_parameters()
    with torch.no_grad():
        if not compact:
            stored = _in_layout_of(param, param if fp32_tensor is None else fp32_tensor, torch.float32)
        elif fp32_tensor is None:
            stored = torch.zeros_like(param, dtype=REST_DTYPE, requires_grad=False)
        else:
            half, rest = split(fp32_tensor.detach().to(param.device, torch.float32), param.dtype)
            stored = _in_layout_of(param, rest, REST_DTYPE)
            param.copy_(half)
    setattr(param, MASTER_ATTRIBUTE, _Record(stored))
    mark_in_sync([param])
    return stored


@functools.cache
def copy_masters_with_parameters() -> None:
    """Make `copy.deepcopy` of a parameter copy its master; torch drops attributes.

    Once per process.
    """
    wrap_parameter_copies(_with_master)


def _with_master(copy_parameter: Callable[..., Any]) -> Callable[..., Any]:
    def copy_with_master(param: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(param) not in memo
        stored = stored_master(param)  # first: it may change the parameter
        result = copy_parameter(param, memo)
        if is_new and stored is not None:
            setattr(result, MASTER_ATTRIBUTE, _Record(stored.clone()))
            mark_in_sync([result])
        return result

    return copy_with_master


def master_record(param: Tensor) -> _Record | None:
    """Return the record of a parameter's master, not brought up to date; None if it has none."""
    return getattr(param, MASTER_ATTRIBUTE, None)


def master_of(param: Tensor) -> Tensor | None:
    """Return the float32 master of a parameter, or None if it has none.

    If the half parameter was edited since the last call (in place, by `load_state_dict`, by
    `param.data = x`), its master takes over the changes. It also moves to the device of the
    parameter. `param.data.copy_(x)` cannot be noticed; call `refresh_master` after it.

    A compact master is computed at each call; `publish` stores changes of the returned tensor.
    """
    stored = stored_master(param)
    return stored if stored is None or stored.dtype is not REST_DTYPE else join(param.detach(), stored)


def stored_master(param: Tensor) -> Tensor | None:
    """Return what a parameter stores: its master, or the rest of a compact one.

    None if it has none.

    Brought up to date as by `master_of`.
    """
    record = master_record(param)
    if record is None:
        return None
    if record.version == param._version and record.data_ptr == param.data_ptr() and record.half is param.dtype:
        return record.stored
    return _follow(param, record)


def _follow(param: Tensor, record: _Record) -> Tensor | None:
    if not is_half(param):  # model.float(): the parameter is its own master again, with all bits
        if param.dtype == torch.float32 and param.shape == record.stored.shape:
            with torch.no_grad():
                _restore_bits(param, record, record.stored.to(param.device))  # to("cpu", torch.float32) also moves it
        detach_master(param)
        return None
    moved = record.version == param._version and record.device != param.device
    of_other_dtype = record.is_compact and record.half is not param.dtype
    if (record.version is None or moved) and not of_other_dtype:
        record.stored = _in_layout_of(param, record.stored, record.stored.dtype)
        record.note(param)
        return record.stored
    return _take_over_edit(param, record)


def _restore_bits(param: Tensor, record: _Record, stored: Tensor) -> None:
    """Write a master into its float32 parameter, except for elements that were edited."""
    if not record.is_compact:
        param.copy_(torch.where(stored.to(record.half).float() == param, stored, param))
    elif record.version in (None, param._version):  # otherwise the rests may belong to other values
        half = param.to(record.half)
        param.copy_(torch.where(half.float() == param, join(half, stored), param))


def _take_over_edit(param: Tensor, record: _Record) -> Tensor | None:
    """Copy the elements that were changed into the master.

    Elements that still equal its rounded value stay.

    So copying a weight onto itself loses nothing; wrapping a model for distributed training does
    that in one process. With several ranks the whole half value becomes the master: then all ranks
    have the same master, even if only half weights were broadcast. The same for a compact master,
    which does not show which elements changed.
    """
    is_elsewhere = record.stored.shape != param.shape or record.stored.device != param.device
    if is_elsewhere or record.is_compact or has_several_ranks():
        return refresh_master(param)
    with torch.no_grad():
        is_same = record.stored.to(param.dtype) == param
        right = torch.where(is_same, record.stored, param.float())
        if record.stored.stride() == param.stride():
            record.stored.copy_(right)  # in place: a captured step knows the address
        else:
            record.stored = _in_layout_of(param, right, torch.float32)
    record.note(param)
    return record.stored


def has_several_ranks() -> bool:
    """Whether this process is one of several in a torch.distributed group."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refresh_master(param: Tensor) -> Tensor | None:
    """Make the half value the master, after `param.data.copy_(x)`; return what is stored."""
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
    """Remove the master of a parameter, if it has one."""
    if hasattr(param, MASTER_ATTRIBUTE):
        delattr(param, MASTER_ATTRIBUTE)
        drop_copies(param)


def publish(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write float32 values into half parameters and masters, and mark both as in sync."""
    together: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for param, master in zip(params, masters, strict=True):
            record: _Record = getattr(param, MASTER_ATTRIBUTE)
            # One by one: temporaries of all would need the memory of full masters
            if record.is_compact:
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
    """Copy tensors by one call per dtype.

    Some releases of torch use the dtype of the first for all.
    """
    by_dtype: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        for column, tensor in zip(by_dtype[target.dtype], (target, source), strict=True):
            column.append(tensor)
    for columns in by_dtype.values():
        foreach_copy_(*columns)


def float32_like(stored: Tensor) -> Tensor:
    """Return a float32 tensor of the shape and device of a stored master.

    Its values are undefined.
    """
    if stored.dtype is not REST_DTYPE:
        return stored
    return stored.new_empty((), dtype=torch.float32).expand(stored.shape)


def mark_in_sync(params: Sequence[Tensor]) -> None:
    """Note that half parameters and their stored masters agree now."""
    for param in params:
        getattr(param, MASTER_ATTRIBUTE).note(param)


def _in_layout_of(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` detached, in `dtype`, on the device and with the strides of `param`.

    Copied if needed.
    """
    value = value.detach()
    like = torch.empty_like(param, dtype=dtype, requires_grad=False)
    if value.dtype == dtype and value.device == like.device and value.stride() == like.stride():
        return value
    return like.copy_(value)
