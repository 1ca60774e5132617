"""What keeps `torch.compile` from mixing up policies.

In a process: Dynamo guards torch's autocast state (for every device type torch knows), not our policy. So each policy is
written into the autocast dtype of device types that no machine here has; a function compiled under one policy is then
compiled again under another, by Dynamo's own guard.

Inside a compiled function a region is a graph break: Dynamo leaves the code of `auto_cast` alone, and what runs inside the
region is compiled as a function of its own, under the first rule. With `fullgraph=True` that is Dynamo's error, with our
advice in it.

On disk: the compile caches key a graph by its text, and the text is the same under every policy. So while a function is
compiled under a policy, the cache key carries the policy's digest.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mezzo.amp._policy import Policy
from mezzo.amp._state import current_policy

_UNUSED_DEVICES = ("maia", "ipu")

F = TypeVar("F", bound=Callable[..., Any])
Marker = tuple[tuple[str, bool, torch.dtype], ...]


@functools.cache
def _markers() -> list[Marker]:
    """Return every combination of dtypes for the unused device types: one a policy."""
    dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    pairs = itertools.product(dtypes, repeat=len(_UNUSED_DEVICES))
    return [tuple((device, True, dtype) for device, dtype in zip(_UNUSED_DEVICES, pair, strict=True)) for pair in pairs]


_NO_POLICY: Marker = tuple((device, False, torch.float32) for device in _UNUSED_DEVICES)
_numbers: dict[Policy, int] = {}


def marker_of(policy: Policy | None) -> Marker:
    """Return the autocast settings that tell Dynamo this policy from any other; empty while Dynamo is not loaded."""
    if "torch._dynamo" not in sys.modules:
        return ()
    _tag_compile_caches()
    if policy is None:
        return _NO_POLICY
    number = _numbers.setdefault(policy, len(_numbers))
    if number >= len(_markers()):
        raise RuntimeError(f"more than {len(_markers())} different policies in one process that uses torch.compile")
    return _markers()[number]


_tags_before: list[str] = []


def _tag_start(*_: Any) -> None:
    policy = current_policy()
    _tags_before.append(torch.compiler.config.cache_key_tag)
    if policy is not None:
        torch.compiler.config.cache_key_tag = f"{_tags_before[-1]}mezzo-{policy.digest}"


def _tag_end(*_: Any) -> None:
    if _tags_before:
        torch.compiler.config.cache_key_tag = _tags_before.pop()


def _tag_compile_caches() -> None:
    """Let every compilation under a policy use cache keys of its own (`torch._dynamo.reset` forgets us: ask each time)."""
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    if _tag_start not in handler.start_callbacks:
        handler.register_start_callback(_tag_start)
        handler.register_end_callback(_tag_end)


def hide_from_dynamo(function: F) -> F:
    """Mark a function as one that Dynamo neither traces nor compiles; free outside torch.compile, imports nothing."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "mezzo.amp.auto_cast inside a compiled function: enter the region around the call of the compiled function instead"
    )
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
