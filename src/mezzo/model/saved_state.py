"""Checks of a saved training state, made before the running session changes.

Checksums detect damage. An edited state, or one from another source, can have correct checksums and
still hold a step "abc" or momenta of the wrong shape.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer, RMSprop

from mezzo.files import short_repr

#: Exceptions from reading a state of the wrong structure; torch raises RuntimeError for most
#: faults.
WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError)
_SWITCHES = frozenset("maximize foreach capturable differentiable fused nesterov amsgrad centered".split())
#: Options that a saved group may lack: newer torch releases add them with defaults, and a scheduler
#: adds `initial_lr`.
_MAY_LACK = _SWITCHES | {"decoupled_weight_decay", "initial_lr"}
_NOT_NEGATIVE = frozenset("lr lr_mult initial_lr momentum eps weight_decay dampening alpha".split())
_MT19937_WORDS = 624


@contextmanager
def part(name: str) -> Iterator[None]:
    """Turn the exceptions in WRONG into a ValueError that names the part of the state."""
    try:
        yield
    except WRONG as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: {reason or type(error).__name__}") from error


def mapping(value: Any) -> dict[Any, Any]:
    """Return `value`; raise ValueError unless it is a dict."""
    if not isinstance(value, dict):
        raise ValueError(f"is {_shown(value)}; must be a dict")
    return value


def whole_number(name: str, value: Any, most: int) -> int:
    """Return `value`; raise ValueError unless it is an int (not a bool) from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {_shown(value)}; must be a whole number from 0 to {most}")
    return value


def score(name: str, value: Any) -> float | None:
    """Return `value`; raise ValueError unless it is 0 to 1, NaN (no label was counted) or None."""
    if value is None:
        return None
    if type(value) not in (int, float) or not (0 <= value <= 1 or value != value):
        raise ValueError(f"{name} is {_shown(value)}; must be a number from 0 to 1")
    return float(value)


def check_tensors(given: Any, own: Mapping[str, Tensor], dtype_of: Callable[[Tensor], torch.dtype]) -> None:
    """Raise ValueError unless names and shapes equal those of `own`, and dtypes `dtype_of`."""
    values = mapping(given)
    if strange := sorted(map(str, set(values) ^ set(own))):
        where = "the checkpoint" if strange[0] in map(str, values) else "this run"
        raise ValueError(f"{short_repr(strange[0])} is only in {where}")
    for name, tensor in own.items():
        value = values[name]
        expected = f"must be a tensor {tuple(tensor.shape)} of {dtype_of(tensor)}"
        if not isinstance(value, Tensor):
            raise ValueError(f"{name!r} is {_shown(value)}; {expected}")
        if value.shape != tensor.shape or value.dtype != dtype_of(tensor):
            raise ValueError(f"{name!r} is a tensor {tuple(value.shape)} of {value.dtype}; {expected}")


# Random number generators


def check_random(state: Any, device: torch.device) -> None:
    """Raise ValueError unless random generators accept the state; tries it on new generators."""
    values = mapping(state)
    _check_torch_generator("torch", values["torch"], torch.device("cpu"))
    on_gpu = values["cuda"]
    if on_gpu is not None and device.type == "cuda":
        _check_torch_generator("cuda", on_gpu, device)
    np.random.RandomState().set_state(numpy_state(values["numpy"]))
    random.Random().setstate(python_state(values["python"]))


def _check_torch_generator(name: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise ValueError(f"{name} is {_shown(value)}; must be a 1-D tensor of bytes")
    torch.Generator(device).set_state(value)


def numpy_state(value: Any) -> tuple[Any, ...]:
    """Return a saved state in NumPy's format; checks the position too, which NumPy does not."""
    kind, keys, position, has_gauss, gauss = value
    is_row = isinstance(keys, Tensor) and keys.dtype == torch.int64 and keys.shape == (_MT19937_WORDS,)
    if kind != "MT19937" or not is_row or bool(((keys < 0) | (keys >= 2**32)).any()):
        raise ValueError(f"numpy is {_shown(value)}; must be a state of MT19937")
    whole_number("numpy position", position, _MT19937_WORDS)
    whole_number("numpy has_gauss", has_gauss, 1)
    if type(gauss) is not float or not math.isfinite(gauss):
        raise ValueError(f"numpy gauss is {_shown(gauss)}; must be a number")
    return kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss


def python_state(value: Any) -> tuple[Any, ...]:
    """Return a saved state in the format of `random.setstate`."""
    if not isinstance(value, list) or not all(type(word) is int for word in value):
        raise ValueError(f"python is {_shown(value)}; must be a list of whole numbers")
    return 3, tuple(value), None


# Optimizers


def check_optimizer(optimizer: Optimizer, state: Any) -> None:
    """Raise ValueError unless a state has the groups, options and tensor shapes of the optimizer.

    Tensors are checked for SGD, Adam, AdamW and RMSprop only: the shapes of other optimizers are
    unknown.
    """
    values = mapping(state)
    groups, own_groups = values["param_groups"], optimizer.param_groups
    if not isinstance(groups, list) or len(groups) != len(own_groups):
        found = f"{len(groups)} parameter groups" if isinstance(groups, list) else _shown(groups)
        raise ValueError(f"param_groups: {found}, this optimizer has {len(own_groups)}")
    params: dict[Any, tuple[Tensor, Mapping[str, Any]]] = {}
    for group, own in zip(groups, own_groups, strict=True):
        _check_group(mapping(group), own)
        for name, param in zip(group["params"], own["params"], strict=True):
            if type(name) not in (int, str) or name in params:
                raise ValueError(f"params: {_shown(name)} must be the number of a parameter, and occur only once")
            params[name] = (param, group)
    for name, entries in mapping(values["state"]).items():
        if name not in params:
            raise ValueError(f"state: {_shown(name)} is not a parameter of this optimizer")
        _check_entries(optimizer, mapping(entries), *params[name])


def _check_group(group: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    params = group["params"]
    if not isinstance(params, list) or len(params) != len(own["params"]):
        found = f"{len(params)} parameters" if isinstance(params, list) else _shown(params)
        raise ValueError(f"params: {found}, the group of this optimizer has {len(own['params'])}")
    if missing := sorted(set(own) - set(group) - _MAY_LACK):
        raise ValueError(f"a group has no {missing[0]}")
    for name, value in own.items():
        if name == "params" or name not in group:
            continue
        saved = group[name]
        if not _is_like(name, saved, value):
            raise ValueError(f"{name} is {_shown(saved)}; must be like {_shown(value)}")
        is_on_cpu = any(param.device.type == "cpu" for param in own["params"])
        if name in ("capturable", "fused") and saved is True and value is not True and is_on_cpu:
            raise ValueError(f"{name} is True, which is not possible for parameters on a CPU")


def _is_like(name: str, saved: Any, own: Any) -> bool:
    if name in _SWITCHES:
        return saved is None or type(saved) is bool
    if isinstance(own, (list, tuple)):
        is_row = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        return is_row and all(map(_is_share if name == "betas" else _is_number, saved))
    if isinstance(own, Tensor) or _is_number(own):
        number = saved.item() if isinstance(saved, Tensor) and saved.numel() == 1 else saved
        return _is_number(number) and (number >= 0 or name not in _NOT_NEGATIVE)
    if isinstance(own, (bool, str)):
        return type(saved) is type(own)
    return True  # None, or a type that only the optimizer knows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _check_entries(optimizer: Optimizer, entries: Mapping[str, Any], param: Tensor, group: Mapping[str, Any]) -> None:
    needed = _needed(optimizer, group)
    if needed is None or not entries:
        return
    if missing := sorted(needed - set(entries)):
        raise ValueError(f"state: a parameter has no {missing[0]}")
    for name, value in entries.items():
        if name == "step":
            number = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            if not _is_number(number) or number < 0:
                raise ValueError(f"state: step is {_shown(value)}; must be a number from 0")
        elif isinstance(value, Tensor):
            if value.shape != param.shape or not value.is_floating_point():
                found = f"{tuple(value.shape)} of {value.dtype}"
                raise ValueError(f"state: {name} is a tensor {found} for a parameter {tuple(param.shape)}")
        elif value is not None or name in needed:
            raise ValueError(f"state: {name} is {_shown(value)}; must be a tensor")


def _needed(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Return the entries that a step of the optimizer requires; None for an unknown optimizer."""
    if isinstance(optimizer, Adam):  # AdamW is a subclass
        return {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
    if isinstance(optimizer, RMSprop):
        with_momentum = {"momentum_buffer"} if group["momentum"] > 0 else set()
        return {"step", "square_avg"} | with_momentum | ({"grad_avg"} if group.get("centered") else set())
    return set() if isinstance(optimizer, SGD) else None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, tuple)) else short_repr(value)
