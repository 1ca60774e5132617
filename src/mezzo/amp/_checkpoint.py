"""`state_dict` of a decorated model: float32 under the usual names, out and in."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import has_master, master_of, publish, stored_master

_SAVE_DTYPES = {dtype_name(d): d for d in (*HALF_DTYPES, torch.float32, torch.float64)}
_MARK = "_mezzo_checkpoint_hooks"
_PENDING = "_mezzo_loading"
_values_in = WeakIdKeyDictionary()
"""By state dict that is still alive: the float32 values made for it, by tensor."""


def parse_save_dtype(save_dtype: Any) -> torch.dtype | None:
    """Return the dtype of saved tensors; None saves float32 masters, and other tensors as stored."""
    if save_dtype is None:
        return None
    name = dtype_name(save_dtype) if isinstance(save_dtype, torch.dtype) else save_dtype
    if isinstance(name, str) and name in _SAVE_DTYPES:
        return _SAVE_DTYPES[name]
    raise ValueError(f"save_dtype={save_dtype!r}: must be None or one of {', '.join(_SAVE_DTYPES)}")


def keep_float32_checkpoints(model: nn.Module, save_dtype: torch.dtype | None) -> None:
    """Make `state_dict` and `load_state_dict` of every module of a model use float32 (or `save_dtype`)."""
    for module in model.modules():
        for handle in module.__dict__.pop(_MARK, ()):
            handle.remove()
        module.__dict__[_MARK] = (
            module.register_state_dict_post_hook(functools.partial(_save, save_dtype)),
            module.register_load_state_dict_pre_hook(_before_load),
            module.register_load_state_dict_post_hook(_after_load),
        )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for holder in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in holder.items() if tensor is not None)


def _save(save_dtype: torch.dtype | None, module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any) -> None:
    for name, tensor in _own(module):
        key = prefix + name
        if key not in state or not tensor.is_floating_point() or isinstance(state[key], nn.Parameter):
            continue  # keep_vars=True asks for the parameter itself
        if stored_master(tensor) is not None or tensor.dtype in HALF_DTYPES:
            state[key] = _float32_value(state, module, name, tensor, save_dtype)
        elif save_dtype is not None:
            state[key] = state[key].to(save_dtype)


def _float32_value(
    state: dict[str, Any], module: nn.Module, name: str, tensor: Tensor, save_dtype: torch.dtype | None
) -> Tensor:
    """Return the master of a half tensor, or its value; tied names of one tensor get the same object."""
    try:
        seen = _values_in.setdefault(state, {})
    except TypeError:  # a plain dict of the caller has no weak references
        seen = {}
    if id(tensor) not in seen:
        master = master_of(tensor)
        value = (tensor.detach() if master is None else master).to(save_dtype or torch.float32)
        seen[id(tensor)] = value.detach()  # another object on the same memory, whose end can be seen
        if save_dtype is None and not value.is_inference() and isinstance(state, OrderedDict):
            lent = _Lent(weakref.ref(module), name, id(tensor), tensor._version, value, value._version)
            weakref.finalize(seen[id(tensor)], _take_back, lent).atexit = False
    found: Tensor = seen[id(tensor)]
    return found


class _Lent(NamedTuple):
    """A float32 value in a state dict, and the half tensor that it belongs to."""

    module: weakref.ref[nn.Module]
    name: str
    tensor_id: int
    version: int
    value: Tensor
    value_version: int


def _take_back(lent: _Lent) -> None:
    """Write in-place changes of a value of a state dict into the model when the value is deleted.

    A state dict of an undecorated model holds the weights themselves, and hand-written averages (timm, YOLO) write
    into it in place. timm's ModelEmaV3 deletes the state dict first and writes into its values then.
    """
    module = lent.module()
    tensor = None if module is None else dict(_own(module)).get(lent.name)
    if tensor is None or id(tensor) != lent.tensor_id or lent.value._version == lent.value_version:
        return
    if tensor._version != lent.version:  # a step or `load_state_dict` has written both since
        return
    with torch.no_grad():
        if has_master(tensor):
            publish([tensor], [lent.value])
        else:
            tensor.copy_(lent.value)


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Keep the float32 values: torch copies them into the half tensors, rounded."""
    pending = {
        name: state[prefix + name]
        for name, tensor in _own(module)
        if prefix + name in state and stored_master(tensor) is not None
    }
    if pending and metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            "load_state_dict(assign=True) would replace the half parameters of a decorated model and lose their masters; "
            "load without assign, or decorate after loading"
        )
    module.__dict__[_PENDING] = pending


@torch.no_grad()
def _after_load(module: nn.Module, _incompatible: Any) -> None:
    for name, value in module.__dict__.pop(_PENDING, {}).items():
        tensor = dict(_own(module))[name]
        is_old_scalar = tensor.dim() == 0 and value.shape == (1,)  # torch accepts it
        if tensor.shape == value.shape or is_old_scalar:  # otherwise torch refuses it and loads nothing
            publish([tensor], [value.reshape(tensor.shape)])


def float32_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU with float32 weights; for a decorated model, these are its masters."""
    state = model.state_dict()
    copied = copy.deepcopy(model).cpu().float()
    with torch.no_grad():
        for name, value in (*copied.named_parameters(), *copied.named_buffers()):
            if name in state and value.is_floating_point():
                value.copy_(state[name])
    return copied
