"""Which kernels take the step: Triton's where they work, torch's fused ones elsewhere.

Why: only building a kernel shows whether Triton works, and torch has no function for that.
Releases: 2.11 to 2.15.
Without it: a machine without a C compiler or with an old driver fails in its first step.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mezzo._torch.modes import no_dispatch_modes

_TIERS = ("auto", "triton", "fused")
_asked = "auto"


@contextmanager
def step_tier(name: str) -> Iterator[None]:
    """Return a context in which one tier takes all steps, for comparisons and to find errors.

    Args:
        name: `triton`, `fused` (torch's own kernels), or `auto`, the default: Triton where it works.
            With `triton` steps raise RuntimeError where Triton does not work.

    Raises:
        ValueError: `name` is unknown.
    """
    global _asked
    if name not in _TIERS:
        raise ValueError(f"step_tier({name!r}): must be one of {', '.join(_TIERS)}")
    before, _asked = _asked, name
    try:
        yield
    finally:
        _asked = before


def tier_asked() -> str:
    """Return the name that `step_tier` was called with."""
    return _asked


def uses_triton(device: torch.device) -> bool:
    """Whether Triton takes the steps on a device.

    Raises:
        RuntimeError: `step_tier("triton")` is asked for, and Triton does not work here.
    """
    if _asked == "fused":
        return False
    works = _works_on(device.type) is None
    if _asked == "triton" and not works:
        raise RuntimeError(f"step_tier('triton'): {_works_on(device.type)}; use 'auto' or 'fused'")
    return works


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device, whichever tier takes the steps."""
    return _works_on(device.type) is None


@functools.cache
def _works_on(device_type: str) -> str | None:
    """Return why Triton does not work on a device type; None if it does."""
    # Triton's own switch: kernels run in Python, on the host
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type != ("cpu" if interpreted else "cuda"):
        return f"Triton has no kernels for {device_type} tensors"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not interpreted and not torch.cuda.is_available():  # a tensor without memory on a device that is not here
        return "there is no CUDA device"
    if not interpreted and torch.cuda.get_device_capability() < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or above"
    try:
        from mezzo._torch.triton_probe import try_kernel

        with no_dispatch_modes():  # while a graph is traced, tensors have no memory
            try_kernel(device_type)
    except Exception as error:  # noqa: BLE001  a broken Triton, no C compiler, an old driver: many kinds, all mean this
        message = (str(error).strip().splitlines() or ["no message"])[0]
        reason = f"Triton cannot build a kernel here ({type(error).__name__}: {message})"
        warnings.warn(f"{reason}; steps use torch's fused kernels, which move twice the bytes", stacklevel=2)
        return reason
    return None
