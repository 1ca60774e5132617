"""The optimizer step on float32 masters: check, update, and the half copy of the result."""

from mezzo._torch.parameters import has_master
from mezzo._torch.step_tier import step_tier, uses_triton
from mezzo.optim._check import Verdict
from mezzo.optim._engine import (
    StepEngine,
    StepRequest,
    attach,
    engine_of,
    find_engine,
    refuse_lookalike,
    split_closure,
    takes_grad_scaler,
    unwrap_optimizer,
)
from mezzo.optim._half_state import stored_dtype
from mezzo.optim._masters import (
    attach_master,
    copy_all,
    copy_masters_with_parameters,
    detach_master,
    float32_like,
    mark_in_sync,
    master_of,
    publish,
    refresh_master,
    stored_master,
)
from mezzo.optim._names import describe_parameter, name_of, remember_names
from mezzo.optim._outside import forget_casts, keep_autocast, outside_autocast
from mezzo.optim._rescale import COUNTERS, rescale
from mezzo.optim._shards import is_dtensor
from mezzo.optim._share import share_weights

__all__ = [
    "attach_master",
    "master_of",
    "stored_master",
    "has_master",
    "refresh_master",
    "detach_master",
    "publish",
    "copy_all",
    "copy_masters_with_parameters",
    "float32_like",
    "mark_in_sync",
    "StepEngine",
    "StepRequest",
    "Verdict",
    "is_dtensor",
    "share_weights",
    "attach",
    "engine_of",
    "find_engine",
    "refuse_lookalike",
    "split_closure",
    "takes_grad_scaler",
    "stored_dtype",
    "unwrap_optimizer",
    "outside_autocast",
    "forget_casts",
    "keep_autocast",
    "remember_names",
    "name_of",
    "describe_parameter",
    "rescale",
    "COUNTERS",
    "step_tier",
    "uses_triton",
]
