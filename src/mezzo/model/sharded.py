"""FSDP2: shard weights, gradients and optimizer state of models too large for one device.

The shards are float32 masters. FSDP gathers a layer's weights in half precision while the layer
computes, and reduces gradients in float32. It gathers norms in float32, because their kernels do
not accept half weights together with float32 statistics.
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

_GROUP_SIZE = 1_000_000  # smallest number of parameters that is worth a separate all-gather
_NORMS = (NormBase, nn.LayerNorm, nn.GroupNorm)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
#: Layers that are never executed have no optimizer state.
_WITH_GAPS = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


class ShardingError(MezzoError):
    """FSDP is not possible in this run."""


def shard(model: nn.Module, precision: Precision, world: World) -> nn.Module:
    """Shard a model in place and return it.

    Raises:
        ShardingError: The run has only one process.
    """
    if world.size == 1:
        raise ShardingError("--fsdp needs several processes, this run has one: start with torchrun --nproc_per_node=N")
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
    """Return modules of at least _GROUP_SIZE parameters, to gather separately, inner ones first."""
    groups = []
    for module in reversed(list(model.modules())[1:]):
        free = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free) >= _GROUP_SIZE:
            taken |= {id(p) for p in free}
            groups.append(module)
    return groups


def whole_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return full weights and optimizer state, in other processes than the first empty dicts.

    All processes must call it.
    """
    return get_model_state_dict(model, options=_WHOLE), get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def load_whole_states(
    model: nn.Module, optimizer: Optimizer, weights: dict[str, Any], optimizer_state: dict[str, Any]
) -> None:
    """Load full states; every process passes all of them and keeps its shards."""
    set_model_state_dict(model, weights, options=_WHOLE)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=_WITH_GAPS)
