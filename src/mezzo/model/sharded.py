"""FSDP2 in the training command: shard a model, and gather whole states for checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from mezzo.errors import MezzoError
from mezzo.model.parallel import World
from mezzo.precision import Precision

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
    return precision.shard(model, mesh=init_device_mesh(world.device.type, (world.size,)))


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
