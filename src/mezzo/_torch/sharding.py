"""Parameters of FSDP: the shard of a DTensor on this rank, its dtype when gathered, and the marks of FSDP1.

Why: the step computes on shards, without a DTensor's dispatch for every operator;
`DTensor.to_local` is recorded by autograd and takes longer. FSDP1 keeps several parameters in one,
which the step does not support and refuses. FSDP2 has no public way to ask in which dtype it
gathers a weight.
Releases: 2.11 to 2.15.
Without it: no step on sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

local_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the part of a DTensor on this rank."""


def is_of_fsdp1(param: Tensor) -> bool:
    """Whether a parameter is FSDP1's: a flat one, or one inside of it (`use_orig_params`)."""
    return getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False)


def gathering_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype in which FSDP2 gathers each sharded parameter of a model, by the id of the parameter."""
    found: dict[int, torch.dtype] = {}
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        # From torch 2.13 on a module may have several groups.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            for param in group.fsdp_params:
                # From torch 2.15 on each parameter has a policy of its own.
                policy = getattr(param, "mp_policy", None) or group.mp_policy
                found[id(param.sharded_param)] = policy.param_dtype or param.sharded_param.dtype
    return found


def global_offsets(tensor: Any) -> tuple[int, ...]:
    """Return, per dimension, where the shard of this rank begins in a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)
