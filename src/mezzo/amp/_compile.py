"""What keeps `torch.compile` from mixing up policies.

In a process each policy has a marker that Dynamo guards (`_marker`): a function is compiled once a policy.

Inside a compiled function a region is a graph break: Dynamo leaves the code of `auto_cast` alone, and what runs inside the
region is compiled as a function of its own, under that rule. With `fullgraph=True` that is Dynamo's error, with our
advice in it.

On disk: the compile caches key a graph by its text, and the text is the same under every policy. So while a function is
compiled under a policy, the cache key carries the policy's digest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mezzo._torch.dynamo import call_around_compilations
from mezzo.amp._cpu import emulates
from mezzo.amp._state import current_policy

_tags_before: list[str] = []


def _tag_start(*_: Any) -> None:
    policy = current_policy()
    _tags_before.append(torch.compiler.config.cache_key_tag)
    if policy is not None:
        # 'auto' is what a probe of this CPU said in this process: another answer is another graph.
        how = "-emulated" if emulates(policy) else ""
        torch.compiler.config.cache_key_tag = f"{_tags_before[-1]}mezzo-{policy.digest}{how}"


def _tag_end(*_: Any) -> None:
    if _tags_before:
        torch.compiler.config.cache_key_tag = _tags_before.pop()


tag_compile_caches = functools.partial(call_around_compilations, _tag_start, _tag_end)
"""Let every compilation under a policy use cache keys of its own; called at each region, because a reset of Dynamo forgets."""
