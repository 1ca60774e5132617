"""DTensors and their shards on this rank.

Their module is not imported here: unless the user imports it, there are no DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from mezzo._torch.sharding import local_shard


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return the shard of a DTensor on this rank; other tensors unchanged."""
    shard: Tensor = local_shard(tensor) if is_dtensor(tensor) else tensor
    return shard


def like_dtensor(model: Any, shard: Tensor) -> Tensor:
    """Return a DTensor with the placement of `model` and this rank's `shard`."""
    result: Tensor = type(model).from_local(
        shard, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
    return result
