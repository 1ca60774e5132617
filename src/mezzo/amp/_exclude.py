"""Modules that stay in float32, chosen by instance, type or name; their code does not change."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._torch.autocast_state import is_any_autocast_enabled
from mezzo._torch.pytree import tree_map
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import detach_master, master_of, stored_master

Excluded = nn.Module | type[nn.Module] | str

_MARK = "_mezzo_forward_before_exclusion"


def find_excluded(
    model: nn.Module, excluded_layers: Excluded | Sequence[Excluded] | None, argument: str = "excluded_layers"
) -> list[nn.Module]:
    """Return the outermost excluded modules of a model.

    Args:
        model: The model to search.
        excluded_layers: A module of the model, a module type, a name glob such as `encoder.*.norm`, or a list of these.
        argument: The name of the argument in error messages.

    Raises:
        TypeError: It is none of these.
        ValueError: A module is not part of the model, or no name matches a glob.
    """
    if excluded_layers is None:
        return []
    wanted = excluded_layers if isinstance(excluded_layers, (list, tuple, set, frozenset)) else [excluded_layers]
    names = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    found: list[nn.Module] = []
    for item in wanted:
        found += [module for module in _match(names, item, argument) if module not in found]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


def _match(names: dict[str, nn.Module], item: Any, argument: str) -> Iterable[nn.Module]:
    if isinstance(item, nn.Module):
        if not any(module is item for module in names.values()):
            raise ValueError(f"{argument}: this {type(item).__name__} is not part of the model")
        return [item]
    if isinstance(item, type) and issubclass(item, nn.Module):
        of_type = [module for module in names.values() if isinstance(module, item)]
        if not of_type:
            warnings.warn(f"{argument}: the model has no {item.__name__}", UserWarning, stacklevel=4)
        return of_type
    if isinstance(item, str):
        matching = [module for name, module in names.items() if fnmatch.fnmatchcase(name, item)]
        if not matching:
            close = difflib.get_close_matches(item, [name for name in names if name], n=1)
            some = ", ".join(list(names)[1:6]) or "no submodules"
            if close:
                raise ValueError(f"{argument}: no module is named {item!r}; did you mean {close[0]!r}?")
            raise ValueError(f"{argument}: no module is named {item!r}; the model has {some}")
        return matching
    raise TypeError(
        f"{argument}: {item!r} is {type(item).__name__}; give modules, module types or name globs, or a list of them"
    )


class ExclusionHandle:
    """Undoes a change of modules' forwards."""

    def __init__(self, modules: list[nn.Module], mark: str = _MARK) -> None:
        self.modules = modules
        self._mark = mark

    def remove(self) -> None:
        """Give the modules their forwards back: excluded ones follow `auto_cast` again."""
        for module in self.modules:
            if self._mark in module.__dict__:  # otherwise it was undone already
                unwrap_forward(module, self._mark)


def exclude_layers(model: nn.Module, excluded_layers: Excluded | Sequence[Excluded] | None) -> ExclusionHandle:
    """Run some modules of a model in float32 inside every `auto_cast` region, at any level.

    Half inputs are cast to float32, and results stay float32. Half weights of a decorated model become float32 again,
    with the values of their masters; optimizers that hold them stay valid.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> handle = exclude_layers(net, "1")
    """
    modules = [m for m in find_excluded(model, excluded_layers) if not is_excluded(m)]
    refuse_half_without_master(modules)
    for module in modules:
        _restore_float32(module)
        wrap_forward(module, _MARK, _forward_in_float32)
    return ExclusionHandle(modules)


_MARKS: dict[str, Callable[..., Any]] = {}
"""Attribute under which a module keeps its original forward: the function that wraps it."""


def wrap_forward(module: nn.Module, mark: str, forward: Callable[..., Any]) -> None:
    """Replace a module's forward by a function that gets the module first; keep the original under `mark`."""
    _MARKS[mark] = forward
    module.__dict__[mark] = module.__dict__.get("forward")
    module.__dict__["forward"] = functools.partial(forward, module)


def unwrap_forward(module: nn.Module, mark: str) -> None:
    """Undo `wrap_forward`, also if another wrapper was added later."""
    before = module.__dict__.pop(mark)
    above = next(
        (other for other in _MARKS if _is_wrapper(module.__dict__.get(other), _MARKS[mark])),
        None,
    )
    if above is not None:
        module.__dict__[above] = before
    elif before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


def _is_wrapper(forward: Any, function: Callable[..., Any]) -> bool:
    return isinstance(forward, functools.partial) and forward.func is function


def rebind_forward(module: nn.Module) -> None:
    """Bind wrappers of a forward to the module that has them: a replica copied them from another module."""
    for name in ("forward", *_MARKS):
        forward = module.__dict__.get(name)
        if isinstance(forward, functools.partial) and forward.func in _MARKS.values() and forward.args[0] is not module:
            module.__dict__[name] = functools.partial(forward.func, module)


def refuse_half_without_master(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if a module to exclude has half weights without masters."""
    for name, param in (named for module in modules for named in module.named_parameters()):
        if param.dtype in HALF_DTYPES and stored_master(param) is None:
            raise ValueError(
                f"excluded_layers: {name!r} is {dtype_name(param.dtype)} and has no float32 value; "
                "call .float() on the layer first"
            )


def _restore_float32(module: nn.Module) -> None:
    """Make the half weights and buffers of a module float32, with the values of their masters."""
    for param in module.parameters():
        master = master_of(param)
        if master is not None:
            param.grad = None
            param.data = master
            detach_master(param)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.dtype in HALF_DTYPES:
                kept = master_of(buffer)
                part._buffers[name] = buffer.float() if kept is None else kept


def is_excluded(module: nn.Module) -> bool:
    """Whether a module itself was excluded, not only a parent."""
    return _MARK in module.__dict__


def _forward_in_float32(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not is_any_autocast_enabled():
        return forward_before(module, _MARK, *args, **kwargs)
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        return forward_before(module, _MARK, *tree_map(_to_float32, args), **tree_map(_to_float32, kwargs))


def forward_before(module: nn.Module, mark: str, *args: Any, **kwargs: Any) -> Any:
    """Call the forward that `wrap_forward` kept under `mark`."""
    own = module.__dict__[mark]
    return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def _to_float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
