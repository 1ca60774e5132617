"""Names of devices: the one parser that commands, options and functions use.

`parse_device` reads a name; `find_device` also checks that this machine has the device. Command
lines and files name a GPU `gpu` (Paddle) or `cuda` (torch), with or without a number; this module
is where both become the same. Importing it does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mezzo.errors import MezzoError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceError", "DeviceName", "find_device", "parse_device"]

KINDS = ("auto", "cpu", "cuda", "xpu", "npu", "mlu")
CPU_OR_GPU = ("auto", "cpu", "cuda")
_SPELLINGS = {"cuda": ("gpu", "gpu:N", "cuda", "cuda:N")}


class DeviceError(MezzoError, ValueError):
    """An unknown name of a device, or a device that this machine does not have."""


class DeviceName(NamedTuple):
    """A device name in parts."""

    kind: str
    """One of `KINDS`; `gpu` has become `cuda`."""
    number: int | None
    """None if the name has no number."""


def parse_device(
    device: str | torch.device | None, kinds: Sequence[str] = KINDS, setting: str = "device {}"
) -> DeviceName:
    """Return the kind and the number of a device. This does not check that the device exists.

    Args:
        device: A name, a `torch.device`, or None, which is the same as `auto`.
        kinds: The kinds that are allowed here, out of `KINDS`.
        setting: How an error message writes the choice of a device, such as `--device {}`.

    Raises:
        DeviceError: The name is unknown; the message lists the names that are allowed.

    >>> parse_device("gpu:1")
    DeviceName(kind='cuda', number=1)
    >>> parse_device("tpu", CPU_OR_GPU, "--device {}")
    Traceback (most recent call last):
    ...
    mezzo.devices.DeviceError: --device tpu: must be one of auto, cpu, gpu, gpu:N, cuda, cuda:N
    """
    name = "auto" if device is None else str(device)
    kind, colon, number = name.partition(":")
    kind = "cuda" if kind == "gpu" else kind
    may_have_number = kind not in ("auto", "cpu") or not isinstance(device, str)
    if kind not in kinds or (colon and not (may_have_number and number.isdecimal())):
        allowed = ", ".join(spelling for each in kinds for spelling in _SPELLINGS.get(each, (each,)))
        raise DeviceError(f"{setting.format(name)}: must be one of {allowed}")
    return DeviceName(kind, int(number) if number else None)


def find_device(
    device: str | torch.device | None = None, setting: str = "--device {}", local_rank: int | None = None
) -> torch.device:
    """Return a CPU or a GPU of this machine.

    Args:
        device: `auto` or None takes the GPU if there is one.
        setting: How an error message writes the choice of a device.
        local_rank: The number of this process on its machine, if there are several: each has its own GPU.

    Raises:
        DeviceError: The name is unknown, or this machine does not have the device.
    """
    import torch

    kind, index = parse_device(device, CPU_OR_GPU, setting)
    count = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and count == 0):
        return torch.device("cpu")
    asked = setting.format(device)
    if index is not None and local_rank is not None:
        raise DeviceError(
            f"{asked}: each process has its own GPU; use {setting.format('gpu')} and choose the GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if count == 0:
        raise DeviceError(f"{asked}: this machine has no CUDA device; use {setting.format('cpu')}")
    index = (local_rank or 0) if index is None else index
    if index >= count:
        advice = "" if local_rank is None else "; start fewer processes"
        raise DeviceError(f"{asked}: there is no GPU {index}, this machine has {count} (0 to {count - 1}){advice}")
    return torch.device("cuda", index)
