"""What `torch.compile` needs under a policy: it must not mix up policies, and keep casts out of the backward.

In one process, each policy has a marker that Dynamo guards (`_marker`): a function is compiled once per policy.

Inside a compiled function a region is a graph break: Dynamo does not trace `auto_cast`, and compiles the code inside the
region as another function. With `fullgraph=True` Dynamo raises an error that holds mezzo's advice.

On disk, compile caches use the text of a graph as key, which is the same under every policy and in every release of
mezzo. So the cache key also carries the digests of the policy and of mezzo's sources while a function is compiled under
a policy.

A backward is traced outside of the policy, which decides in forward passes only. torch would trace it inside: it would
make products of float32 gradients half, also those of excluded layers and of operators on the black list.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mezzo._torch.aot_autograd import backward_outside_autocast
from mezzo._torch.dynamo import call_around_compilations
from mezzo._version import version_of
from mezzo.amp._cpu import emulates
from mezzo.amp._state import current_policy
from mezzo.fp8 import show_parts_to_inductor

_TRACED = ("_torch", "amp", "fp8", "kernels", "optim", "static")
"""Packages whose code decides what a compiled graph computes."""

_open: list[ExitStack] = []
"""Settings of the compilations that run now, innermost last."""


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


def _begin(*_: Any) -> None:
    policy, settings = current_policy(), ExitStack()
    _open.append(settings)
    if policy is None:
        return
    # 'auto' depends on a measurement in this process: another answer gives another graph.
    how = "-emulated" if emulates(policy) else ""
    if policy.fp8 is not None:
        show_parts_to_inductor()
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag}mezzo-{source_digest()}-{policy.digest}{how}"
    settings.enter_context(config.patch(cache_key_tag=tag))
    settings.enter_context(backward_outside_autocast())


def _end(*_: Any) -> None:
    if _open:
        _open.pop().close()


prepare_compilations = functools.partial(call_around_compilations, _begin, _end)
"""Set what every compilation under a policy needs; called at each region, because a reset of Dynamo drops it."""
