"""Parameters of FSDP: the shard of a DTensor on this rank, and the marks of FSDP1.

Why: the step computes on shards, without a DTensor's dispatch for every operator;
`DTensor.to_local` is recorded by autograd and takes longer. FSDP1 keeps several parameters in one,
which the step does not support and refuses.
Releases: 2.11 to 2.15.
Without it: no step on sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor

local_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the part of a DTensor on this rank."""


def is_of_fsdp1(param: Tensor) -> bool:
    """Whether a parameter is FSDP1's: a flat one, or one inside of it (`use_orig_params`)."""
    return getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False)
