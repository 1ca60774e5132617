"""The policy of mezzo's own operators that stand for an operator of torch.

They obey the lists under the name of that operator: `enlarge_bilinear` is an `upsample_bilinear2d`. Its
arithmetic is float32 in any case, so that only the dtype of its result is left to decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mezzo._torch.autograd_engine import graph_task_id
from mezzo._torch.dispatcher import DispatchKey, DispatchKeySet, ExcludeKeys
from mezzo.amp._native import AUTOCAST_KEYS
from mezzo.amp._state import current_policy, thread_state
from mezzo.kernels import enlarge_bilinear, operator_name

STANDS_FOR = {enlarge_bilinear: "upsample_bilinear2d"}
"""By operator of mezzo: the operator of torch whose lists it follows."""

_library = torch.library.Library("mezzo", "IMPL")


def _make_kernel(operator: Any, variant: str, device_type: str) -> Any:
    keys = DispatchKeySet(getattr(DispatchKey, AUTOCAST_KEYS[device_type]))

    def kernel(x: Tensor, *args: Any) -> Any:
        policy = current_policy()
        in_backward = graph_task_id() != -1 and not thread_state.is_replaying
        if policy is not None and not in_backward and torch.get_autocast_dtype(device_type) is policy.dtype:
            dtype = policy.decide(variant, (x.dtype,)).dtype
            x = x if dtype is None else x.to(dtype)
        with ExcludeKeys(keys):
            return operator(x, *args)

    return kernel


for _operator, _variant in STANDS_FOR.items():
    for _device_type, _key in AUTOCAST_KEYS.items():
        _library.impl(operator_name(_operator), _make_kernel(_operator, _variant, _device_type), _key)
