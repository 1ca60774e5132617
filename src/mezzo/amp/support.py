"""What mezzo is tested with: releases of torch, and backends.

`mezzo check` prints both lines; docs/releases.md has the table of the test runs.
"""

from __future__ import annotations

import re

from torch import nn

TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The releases of torch in the table of docs/releases.md, oldest first. mezzo supports the first and newer ones."""

DEVICE_TYPES = ("cuda", "cpu")
"""Device types whose tensors follow mezzo's lists. ROCm is `cuda` in torch."""

BACKENDS = {
    "cpu": "tested",
    "cuda": "tested on an H200",
    "rocm": "untested",
    "xpu": "refused",
    "mps": "refused",
    "npu": "refused",
    "mlu": "refused",
}
"""Untested: mezzo runs its code for CUDA there. Refused: `refuse_other_devices`, and `auto_cast` with such a device type."""

Release = tuple[int, int]


def parse_release(version: str) -> Release:
    """Return the release that a version of torch belongs to. Its patches and builds do not count.

    Raises:
        ValueError: It does not begin with two numbers.

    >>> parse_release("2.16.0.dev20261101+cu130")
    (2, 16)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise ValueError(f"version of torch {version!r}: must begin with two numbers, such as 2.15")
    return int(numbers[1]), int(numbers[2])


_OLDEST, _NEWEST = parse_release(TESTED_TORCH[0]), parse_release(TESTED_TORCH[-1])


def is_supported_torch(version: str) -> bool:
    """Return whether a version of torch is not older than the oldest that mezzo supports."""
    return parse_release(version) >= _OLDEST


def describe_torch(version: str) -> str:
    """Return one line about a version of torch: tested, newer than any tested release, or too old.

    >>> describe_torch("2.15.1+cpu")
    'tested: mezzo runs with torch 2.11 to 2.15'
    """
    oldest, newest = (".".join(map(str, release)) for release in (_OLDEST, _NEWEST))
    release = parse_release(version)
    if release > _NEWEST:
        return f"untested: newer than {newest}, the newest tested release; if something fails, install torch {newest}"
    if release < _OLDEST:
        return f"not supported: mezzo needs torch {oldest} or newer; install torch {newest}"
    return f"tested: mezzo runs with torch {oldest} to {newest}"


def describe_backends() -> str:
    """Return one line about the backends that are tested, untested and refused."""
    names: dict[str, list[str]] = {}
    for name, state in BACKENDS.items():
        names.setdefault(state, []).append("ROCm" if name == "rocm" else name.upper())
    return "; ".join(f"{', '.join(found)} {state}" for state, found in names.items())


def refuse_other_devices(model: nn.Module) -> None:
    """Raise ValueError if a parameter is on a device whose tensors mezzo does not cast; `meta` may become any device.

    Half weights would have no lists there, and float32 weights would train in float32 without a word.
    """
    for name, param in model.named_parameters():
        if param.device.type not in (*DEVICE_TYPES, "meta"):
            raise ValueError(
                f"{name!r} is on {param.device}: mezzo casts tensors on {' and '.join(DEVICE_TYPES)} only; move the model "
                "there, or train at level O0"
            )
