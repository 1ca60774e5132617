"""FSDP2: shards of float32 weights are the masters, and layers are gathered in half.

`fully_shard` replaces parameters by float32 shards. While a layer computes, FSDP gathers its weights
in the dtype of a `MixedPrecisionPolicy`, and it reduces gradients in float32. So a sharded model needs
no masters of mezzo: this module only sees to it that each weight is gathered in the dtype that
`decorate` would give it, or in FP8 (`mezzo.fp8`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from mezzo.amp._half_weights import half_parameters
from mezzo.dtypes import dtype_name
from mezzo.fp8 import gather_in_fp8
from mezzo.optim import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GROUP_SIZE = 1_000_000
"""Smallest number of parameters that is worth an all-gather of its own."""


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` replaced parameters of a model."""
    return any(is_dtensor(param) for param in model.parameters())


def shard_model(
    model: nn.Module,
    level: str | None,
    half: torch.dtype,
    excluded: Sequence[nn.Module] = (),
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] | None = None,
    reshard_after_forward: bool = True,
    in_fp8: Sequence[nn.Parameter] = (),
) -> None:
    """Shard a float32 model in place, by FSDP2.

    Args:
        model: The model, on its device. Its parameters are replaced: create optimizers afterwards.
        level: O1, O2 or O3: which weights are gathered in half. None: all are gathered in float32.
        half: The half dtype.
        excluded: Modules that are gathered in float32 at every level.
        mesh: The processes; None: all of them.
        blocks: Modules that are gathered one at a time, such as the layers of a transformer. None: all
            modules of a million parameters or more, the inner ones first. Modules that share a parameter
            with others are gathered with the module around all of them.
        reshard_after_forward: Free gathered weights after the forward pass, and gather them again for
            the backward pass.
        in_fp8: Weights that are gathered in FP8, out of those that are gathered in half.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

    in_half = set() if level is None else half_parameters(model, level, half, excluded)
    groups = _plan(model, level, in_half, blocks)
    # Their inputs are not cast: what they compute is the policy's decision.
    policies = {
        is_half: MixedPrecisionPolicy(
            param_dtype=half if is_half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for is_half in (True, False)
    }
    # FSDP gathers floating parameters only. Integers have no gradient: every process keeps them.
    whole = {param for param in model.parameters() if not param.is_floating_point()}
    chosen = {id(param) for param in in_fp8 if id(param) in in_half}
    names = [name for name, param in model.named_parameters() if id(param) in chosen]  # sharding replaces them
    for modules, is_half in groups:
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=policies[is_half],
            reshard_after_forward=reshard_after_forward,
            ignored_params=whole or None,
        )
    if names:
        gather_in_fp8(model, map(model.get_parameter, names), half, [module for (module, *_), _ in groups])


def _plan(
    model: nn.Module, level: str | None, in_half: set[int], blocks: Iterable[nn.Module] | None
) -> list[tuple[list[nn.Module], bool]]:
    """Return the modules of each group in the order of sharding, and whether the group is gathered in half.

    All parameters of a group are gathered in one dtype, so float32 modules inside of half ones are a group
    of their own. They are sharded first: an outer group takes what the inner ones left.

    Raises:
        ValueError: Layers in half and in float32 share a parameter, or a parameter is not float32 or has no dimension.
    """
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype is not torch.float32:
            raise ValueError(
                f"shard(): {name!r} is {dtype_name(param.dtype)}; a sharded model is float32: use .float()"
            )
        if param.is_floating_point() and param.dim() == 0:
            raise ValueError(f"shard(): {name!r} has no dimension to shard: give it the shape (1,)")
    params = {id(m): [p for p in m.parameters() if p.is_floating_point()] for m in model.modules()}
    chosen = _separable(model, _large_modules(model) if blocks is None else callable_parts(blocks))
    order = {id(module): place for place, module in enumerate(model.modules())}
    chosen.sort(key=lambda module: -order[id(module)])  # inner ones first
    plain = [m for m in chosen if all(id(p) not in in_half for p in params[id(m)])]
    groups = [([module], False) for module in plain]
    if in_half:
        own = {id(module) for module in plain}
        rest = _separable(model, (m for m in _without_half(model, in_half) if id(m) not in own), together=True)
        groups += [(rest, False)] if rest else []
        plain += rest
    taken = {id(param) for module in plain for param in params[id(module)]}
    is_taken = {id(module) for module in plain}
    for module in (*chosen, model):
        if id(module) in is_taken:
            continue
        free = [param for param in params[id(module)] if id(param) not in taken]
        wide = [param for param in free if id(param) not in in_half]
        if wide and len(wide) < len(free) and level != "O1":  # O1 computes the same with float32 weights
            name = next(name for name, param in model.named_parameters() if param is wide[0])
            raise ValueError(
                f"shard(): level {level} keeps {name!r} in float32, and FSDP gathers it together with half weights, because "
                "layers share it or have no forward() of their own: exclude all of these layers, or none"
            )
        groups.append(([module], bool(free) and not wide))
        taken |= {id(param) for param in free}
    return groups


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. FSDP gathers weights when it is; an `nn.ModuleList` never is."""
    return type(module).forward is not nn.Module.forward


def callable_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules, with the children of containers in place of the containers."""
    found: list[nn.Module] = []
    for module in modules:
        found += [module] if _has_forward(module) else callable_parts(module.children())
    return found


def _separable(model: nn.Module, modules: Iterable[nn.Module], *, together: bool = False) -> list[nn.Module]:
    """Return the modules without those that share a parameter with others: tied weights must be in one group.

    Args:
        model: The whole model.
        modules: Modules that are to be groups of their own; or parts of one group, if `together`.
        together: The modules are one group, and may share parameters among themselves.
    """
    kept = [module for module in modules if module is not model or together]
    paths: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(param), []).append(name)
    shared = {param: names for param, names in paths.items() if len(names) > 1}
    prefixes: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefixes[id(module)] = (*prefixes.get(id(module), ()), f"{name}." if name else "")
    while shared:
        every = tuple(prefix for module in kept for prefix in prefixes[id(module)])
        alone = [
            module
            for module in kept
            if all(
                name.startswith(every if together else prefixes[id(module)])
                for param in module.parameters()
                for name in shared.get(id(param), ())
            )
        ]
        if len(alone) == len(kept):
            break
        kept = alone
    return kept


def _without_half(model: nn.Module, in_half: set[int]) -> list[nn.Module]:
    """Return the outermost modules with parameters of which none is gathered in half."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones come first
        if id(module) in inside or not _has_forward(module):
            continue
        params = list(module.parameters())
        if params and not any(id(param) in in_half for param in params):
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def _large_modules(model: nn.Module) -> list[nn.Module]:
    """Return modules of at least _GROUP_SIZE parameters that are in no smaller such module."""
    taken: set[int] = set()
    groups = []
    for module in reversed(list(model.modules())[1:]):  # inner ones come first
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= _GROUP_SIZE and _has_forward(module):
            taken |= {id(p) for p in free}
            groups.append(module)
    return groups
