"""FSDP2: weights, gradients and optimizer state shared among the processes, for what does not fit on one device.

The shards are float32 masters; a layer's weights are gathered in half while it computes, and gradients are reduced in
float32. Norms are gathered in float32: their kernels take no half weights beside float32 statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from mezzo._torch.layers import NormBase
from mezzo.errors import MezzoError
from mezzo.model.parallel import World
from mezzo.precision import Precision

_GROUP_SIZE = 1_000_000  # parameters that are gathered together: fewer are not worth a message of their own
_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
#: Layers that are never executed have no state of the optimizer.
_WITH_GAPS = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


class ShardingError(MezzoError):
    """FSDP was asked for where it cannot be."""


def shard(model: nn.Module, precision: Precision, world: World) -> nn.Module:
    """Shard a model in place and return it.

    Raises:
        ShardingError: There is one process only.
    """
    if world.size == 1:
        raise ShardingError("--fsdp shares among processes, and there is one: start with torchrun --nproc_per_node=N")
    mesh = init_device_mesh(world.device.type, (world.size,))
    half = None if precision.policy is None else precision.policy.dtype
    mixed = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    norms: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, _NORMS) and any(True for _ in module.parameters())
    ]
    if half is not None and norms:
        fully_shard(norms, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    for module in _groups(model, {id(p) for norm in norms for p in norm.parameters()}):
        fully_shard(module, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return model


def _groups(model: nn.Module, taken: set[int]) -> list[nn.Module]:
    """Return the modules that are gathered on their own, inner ones first, each with enough parameters."""
    groups = []
    for module in reversed(list(model.modules())[1:]):
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= _GROUP_SIZE:
            taken |= {id(p) for p in free}
            groups.append(module)
    return groups


def whole_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights and optimizer state put together, in the first process; empty ones in the others. All call it."""
    return get_model_state_dict(model, options=_WHOLE), get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def load_whole_states(
    model: nn.Module, optimizer: Optimizer, weights: dict[str, Any], optimizer_state: dict[str, Any]
) -> None:
    """Give each process its part of what `whole_states` returned. All call it, each with everything."""
    set_model_state_dict(model, weights, options=_WHOLE)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=_WITH_GAPS)
