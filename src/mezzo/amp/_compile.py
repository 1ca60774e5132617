"""Keeps `torch.compile` from mixing up policies.

In one process, each policy has a marker that Dynamo guards (`_marker`): a function is compiled once per policy.

Inside a compiled function a region is a graph break: Dynamo does not trace `auto_cast`, and compiles the code inside the
region as another function. With `fullgraph=True` Dynamo raises an error that holds mezzo's advice.

On disk, compile caches use the text of a graph as key, which is the same under every policy. So the cache key also
carries the policy's digest while a function is compiled under a policy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mezzo._torch.dynamo import call_around_compilations
from mezzo.amp._cpu import emulates
from mezzo.amp._state import current_policy
from mezzo.fp8 import show_parts_to_inductor

_tags_before: list[str] = []


def _tag_start(*_: Any) -> None:
    policy = current_policy()
    _tags_before.append(torch.compiler.config.cache_key_tag)
    if policy is not None:
        # 'auto' depends on a measurement in this process: another answer gives another graph.
        how = "-emulated" if emulates(policy) else ""
        if policy.fp8 is not None:
            how += f"-{show_parts_to_inductor()}"
        torch.compiler.config.cache_key_tag = f"{_tags_before[-1]}mezzo-{policy.digest}{how}"


def _tag_end(*_: Any) -> None:
    if _tags_before:
        torch.compiler.config.cache_key_tag = _tags_before.pop()


tag_compile_caches = functools.partial(call_around_compilations, _tag_start, _tag_end)
"""Give every compilation under a policy its own cache keys; called at each region, because a reset of Dynamo drops it."""
