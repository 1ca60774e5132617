"""nn.DataParallel looks its parallel_apply up where it is wrapped."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from mezzo._torch import patches
from mezzo._torch.data_parallel import wrap_parallel_apply


def test_replicas_run_through_the_wrapper() -> None:
    module: Any = importlib.import_module("torch.nn.parallel.data_parallel")
    before = module.parallel_apply

    def around(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda replicas, *args, **kwargs: "ours"

    wrap_parallel_apply(around)
    try:
        parallel = nn.DataParallel(nn.Identity())
        assert parallel.parallel_apply([], [], []) == "ours", (
            "DataParallel no longer calls data_parallel.parallel_apply"
        )
    finally:
        module.parallel_apply = before
        patches._wrapped.discard((id(module), "parallel_apply", around))
