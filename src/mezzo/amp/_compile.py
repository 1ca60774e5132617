"""Keeps `torch.compile` from mixing up policies.

In one process, each policy has a marker that Dynamo guards (`_marker`): a function is compiled once per policy.

Inside a compiled function a region is a graph break: Dynamo does not trace `auto_cast`, and compiles the code inside the
region as another function. With `fullgraph=True` Dynamo raises an error that holds mezzo's advice.

On disk, compile caches use the text of a graph as key, which is the same under every policy and in every release of
mezzo. So the cache key also carries the digests of the policy and of mezzo's sources while a function is compiled under
a policy.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from mezzo._torch.dynamo import call_around_compilations
from mezzo._version import version_of
from mezzo.amp._cpu import emulates
from mezzo.amp._state import current_policy
from mezzo.fp8 import show_parts_to_inductor

_TRACED = ("_torch", "amp", "fp8", "kernels", "optim", "static")
"""Packages whose code decides what a compiled graph computes."""

_tags_before: list[str] = []


@functools.cache
def source_digest() -> str:
    """Return a digest of the code that decides what a compiled graph computes, for the keys of caches on disk.

    torch's keys hold the graph as Dynamo recorded it. Without the digest a graph that an older release of mezzo traced
    would be used again.
    """
    digest, root = hashlib.sha256(str(version_of()).encode()), Path(__file__).parents[1]
    for path in sorted(path for package in _TRACED for path in (root / package).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _tag_start(*_: Any) -> None:
    policy = current_policy()
    _tags_before.append(torch.compiler.config.cache_key_tag)
    if policy is not None:
        # 'auto' depends on a measurement in this process: another answer gives another graph.
        how = "-emulated" if emulates(policy) else ""
        if policy.fp8 is not None:
            show_parts_to_inductor()
        torch.compiler.config.cache_key_tag = f"{_tags_before[-1]}mezzo-{source_digest()}-{policy.digest}{how}"


def _tag_end(*_: Any) -> None:
    if _tags_before:
        torch.compiler.config.cache_key_tag = _tags_before.pop()


tag_compile_caches = functools.partial(call_around_compilations, _tag_start, _tag_end)
"""Give every compilation under a policy its own cache keys; called at each region, because a reset of Dynamo drops it."""
