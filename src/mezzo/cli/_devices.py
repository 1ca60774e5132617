"""Devices by the names that command lines give them."""

from mezzo.errors import MezzoError, unknown_choice

_KINDS = ("cpu", "gpu", "cuda", "auto")


class DeviceNameError(MezzoError):
    """A word that names no device."""


def read_device(name: str, use_gpu: bool | None = None) -> str:
    """Return `cpu` or `cuda:N`; `auto` is the GPU if there is one.

    >>> read_device("gpu:1"), read_device("gpu:1", use_gpu=False)
    ('cuda:1', 'cpu')
    """
    kind, _, number = name.partition(":")
    if kind not in _KINDS or (number and not number.isdecimal()):
        raise DeviceNameError(unknown_choice("device", name, ["cpu", "gpu", "gpu:N", "auto"]))
    if use_gpu is not None:
        kind = "gpu" if use_gpu else "cpu"
    if kind == "auto":
        import torch

        kind = "gpu" if torch.cuda.is_available() else "cpu"
    return "cpu" if kind == "cpu" else f"cuda:{number or 0}"
