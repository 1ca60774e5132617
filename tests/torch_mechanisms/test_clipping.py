"""Every clipping function calls the wrapped helper with its gradients."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzo._torch import patches
from mezzo._torch.clipping import wrap_grouping_of_gradients

seen: list[tuple[str, list[Any]]] = []


def look(group: Callable[..., Any]) -> Callable[..., Any]:
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((sys._getframe(1).f_code.co_name, tensors[0]))
        return group(tensors, *args, **kwargs)

    return run


def test_clipping_by_norm_and_by_value_is_seen_with_the_callers_name() -> None:
    module: Any = nn.utils.clip_grad
    before = module._group_tensors_by_device_and_dtype
    assert wrap_grouping_of_gradients(look), "torch's clipping lost its helper: nobody is warned of scaled gradients"
    try:
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        nn.utils.clip_grad_norm_([param], 0.1)
        nn.utils.clip_grad_value_([param], 0.1)
    finally:
        module._group_tensors_by_device_and_dtype = before
        patches._wrapped.discard((id(module), "_group_tensors_by_device_and_dtype", look))
    assert {"_clip_grads_with_norm_", "clip_grad_value_"} <= {name for name, _ in seen}
    assert all(grads[0] is param.grad for _, grads in seen)
