"""Activation checkpointing by block: a block keeps its inputs only, and is computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from mezzo.amp._exclude import Excluded, ExclusionHandle, find_excluded, forward_before, wrap_forward
from mezzo.amp._sharding import callable_parts

_MARK = "_mezzo_forward_before_checkpointing"


def checkpoint_blocks(model: nn.Module, blocks: Excluded | Sequence[Excluded]) -> ExclusionHandle:
    """Compute some modules again in the backward pass instead of keeping their activations, in place.

    At every level the second computation has the dtypes and numbers of the first: gradients are the same bit for bit,
    unless an operator itself is not deterministic. Dropout draws the same numbers again. Names, state dicts, hooks and
    types of modules stay. Call it before or after `prepare`, and before `shard` or `DistributedDataParallel`.

    Args:
        model: The model.
        blocks: Modules, module types or name globs, such as the layers of a transformer (`"layers.*"`). Of nested ones the
            outermost is taken. The children of an `nn.ModuleList` are taken in its place.

    Returns:
        A handle; its `remove()` undoes the call.

    Raises:
        TypeError: A block is none of these.
        ValueError: No name matches a glob, a module is not part of the model, or the whole model is named.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> handle = checkpoint_blocks(net, ["0", "1"])
    """
    found = find_excluded(model, blocks, "blocks")
    if not found or model in found:
        what = "the whole model is named" if found else "no part of the model is named"
        raise ValueError(f"blocks: {what}; name its blocks, such as 'layers.*'")
    found = callable_parts(found)
    chosen = [module for module in found if _MARK not in module.__dict__]
    for module in chosen:
        wrap_forward(module, _MARK, _forward_twice)
    return ExclusionHandle(chosen, _MARK)


def _forward_twice(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(forward_before, module, _MARK)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
