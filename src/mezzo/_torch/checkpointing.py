"""Activation checkpointing, in both of torch's forms.

Why: it runs a forward a second time during the backward pass. torch restores its own autocast state
there and knows nothing of a policy.
Releases: 2.11 to 2.15.
Without it: the second forward computes in other dtypes than the first, and torch raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from mezzo._torch.patches import wrap_attribute

Bind = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gets the function that is checkpointed, returns the one that runs in its place the second time,
and maybe the first."""


def bind_checkpointed_functions(bind: Bind) -> None:
    """Let `bind` replace the functions given to `torch.utils.checkpoint.checkpoint`."""

    def around_reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ctx, function, *args: forward(ctx, bind(function), *args)

    def around_generator(generator: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *args, **kwargs: generator(bind(function), *args, **kwargs)

    if bind in _bound:
        return
    _bound.add(bind)
    wrap_attribute(torch_checkpoint.CheckpointFunction, "forward", around_reentrant, static=True)
    # From torch 2.15 on the first is only another name, for other projects, of the second.
    generator, with_details = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
    wrap_attribute(
        torch_checkpoint, with_details if hasattr(torch_checkpoint, with_details) else generator, around_generator
    )


_bound: set[Bind] = set()
