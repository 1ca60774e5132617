"""Parameters of FSDP: the shard of a DTensor on this rank, how it is gathered, and the marks of FSDP1.

Why: the step computes on shards, without a DTensor's dispatch for every operator;
`DTensor.to_local` is recorded by autograd and takes longer. FSDP1 keeps several parameters in one,
which the step does not support and refuses. FSDP2 has no public way to ask in which dtype it
gathers a weight. It converts a shard before and after gathering if the shard has two functions,
which are documented for tensor subclasses. It looks for them on the tensor itself, so a plain shard
can have them as attributes, and everything else still sees a plain tensor.
Releases: 2.11 to 2.15.
Without it: no step on sharded parameters, and no gathering in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

local_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the part of a DTensor on this rank."""


def is_of_fsdp1(param: Tensor) -> bool:
    """Whether a parameter is FSDP1's: a flat one, or one inside of it (`use_orig_params`)."""
    return getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False)


def _sharded_parameters(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's record of each sharded parameter of a model, and its mixed precision policy."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        # From torch 2.13 on a module may have several groups.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in filter(None, groups):
            for param in group.fsdp_params:
                # From torch 2.15 on each parameter has a policy of its own.
                yield param, getattr(param, "mp_policy", None) or group.mp_policy


def gathering_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype in which FSDP2 hands out each sharded parameter of a model, by the id of the parameter."""
    return {
        id(param.sharded_param): policy.param_dtype or param.sharded_param.dtype
        for param, policy in _sharded_parameters(model)
    }


_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_converted(param: Any) -> bool:
    """Whether functions convert a sharded parameter before and after it is gathered."""
    return hasattr(local_shard(param), _BEFORE)


class ShardedWeight:
    """A weight that FSDP2 sharded along its rows."""

    def __init__(self, record: Any) -> None:
        self._record = record

    @property
    def param(self) -> nn.Parameter:
        """The parameter of the module while it is sharded; `load_state_dict(assign=True)` replaces it."""
        param: nn.Parameter = self._record.sharded_param
        return param

    @property
    def shard(self) -> Tensor:
        """The rows of this process; none if there are fewer rows than processes."""
        return local_shard(self.param)

    @property
    def rows(self) -> int:
        """Number of rows that each process gathers: the last processes add rows of zeros."""
        return int(self._record.padded_sharded_param_size[0])

    @property
    def group(self) -> Any:
        """The processes that have the shards."""
        return self._record.shard_mesh.get_group()

    def convert(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Let functions convert the shard before it is gathered, and the result. Call it once per weight.

        A shard that `load_state_dict(assign=True)`, `to()` or `to_empty()` replaces later is converted, too.

        Args:
            before: Gets mesh, size, stride, module and policy; returns tensors to gather, and metadata.
            after: Gets what was gathered, the metadata and a dtype; returns the parameter, and a tuple.
        """
        take_new_shard = self._record.reset_sharded_param

        def attach() -> None:
            setattr(self.shard, _BEFORE, before)
            setattr(self.shard, _AFTER, after)

        def take_and_attach() -> None:
            take_new_shard()
            attach()

        attach()
        self._record._init_extensions()
        self._record.reset_sharded_param = take_and_attach  # FSDP2 calls it for every new shard


def sharded_weights(model: nn.Module) -> dict[int, ShardedWeight]:
    """Return the sharded parameters of a model, by the id of the parameter."""
    return {id(param.sharded_param): ShardedWeight(param) for param, _ in _sharded_parameters(model)}


def global_offsets(tensor: Any) -> tuple[int, ...]:
    """Return, per dimension, where the shard of this rank begins in a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)
