"""FSDP2: shards of float32 weights are the masters, and layers are gathered in half.

`fully_shard` replaces parameters by float32 shards. While a layer computes, FSDP gathers its weights
in the dtype of a `MixedPrecisionPolicy`, and it reduces gradients in float32. So a sharded model needs
no masters of mezzo: this module only sees to it that each weight is gathered in the dtype that
`decorate` would give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzo._torch.sharding import gathering_dtypes
from mezzo.amp._half_weights import half_parameters
from mezzo.dtypes import dtype_name
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
) -> None:
    """Shard a float32 model in place, by FSDP2.

    Args:
        model: The model, on its device. Its parameters are replaced: create optimizers afterwards.
        level: O1, O2 or O3: which weights are gathered in half. None: all are gathered in float32.
        half: The half dtype.
        excluded: Modules that are gathered in float32 at every level.
        mesh: The processes; None: all of them.
        blocks: Modules that are gathered one at a time, such as the layers of a transformer. None: all
            modules of a million parameters or more, the inner ones first.
        reshard_after_forward: Free gathered weights after the forward pass, and gather them again for
            the backward pass.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

    in_half = set() if level is None else half_parameters(model, level, half, excluded)
    mixed = MixedPrecisionPolicy(
        param_dtype=half if in_half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    in_float32 = _without_half(model, in_half) if in_half else []
    if in_float32:
        # Their inputs are not cast: what they compute is the policy's decision.
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(in_float32, mp_policy=plain, **options)
    taken = {id(param) for module in in_float32 for param in module.parameters()}
    for module in _large_modules(model, taken) if blocks is None else blocks:
        fully_shard(module, mp_policy=mixed, **options)
    if not (in_float32 and in_float32[0] is model):
        fully_shard(model, mp_policy=mixed, **options)


def _without_half(model: nn.Module, in_half: set[int]) -> list[nn.Module]:
    """Return the outermost modules with parameters of which none is gathered in half."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones come first
        if id(module) in inside:
            continue
        params = list(module.parameters())
        if params and not any(id(param) in in_half for param in params):
            found.append(module)
            inside |= {id(each) for each in module.modules()}
    return found


def _large_modules(model: nn.Module, taken: set[int]) -> list[nn.Module]:
    """Return modules of at least _GROUP_SIZE parameters, to gather separately, inner ones first."""
    groups = []
    for module in reversed(list(model.modules())[1:]):
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= _GROUP_SIZE:
            taken |= {id(p) for p in free}
            groups.append(module)
    return groups


def refuse_other_gathering(model: nn.Module, level: str, half: torch.dtype, excluded: Sequence[nn.Module]) -> None:
    """Raise if a sharded model gathers its weights in another dtype than a level asks for.

    Raises:
        RuntimeError: Shards are not float32, or a weight is gathered in another dtype than `decorate` gives it.
    """
    in_half = half_parameters(model, level, half, excluded)
    gathered = gathering_dtypes(model)
    for name, param in model.named_parameters():
        if param.dtype is not torch.float32:
            raise RuntimeError(
                f"prepare(): the shards of {name!r} are {dtype_name(param.dtype)}; sharded weights are their own "
                "masters and must be float32: shard the float32 model"
            )
        wanted = half if id(param) in in_half else torch.float32
        found = gathered.get(id(param), torch.float32)
        if found is not wanted:
            raise RuntimeError(
                f"prepare(): FSDP gathers {name!r} in {dtype_name(found)}, and level {level} keeps it in "
                f"{dtype_name(wanted)}; shard the float32 model by precision.shard(model)"
            )
