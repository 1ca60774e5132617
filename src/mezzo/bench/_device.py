"""The device a benchmark runs on."""

import torch

from mezzo.amp.hardware import parse_device


def find_device(device: str | None, command: str) -> torch.device:
    """Return the device that a user named, the GPU if there is one where he named none.

    Raises:
        ValueError: The machine does not have it, or `command` does not run on it.
    """
    if device is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, index = parse_device(device)
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ValueError(f"--device {device}: {command} runs on cpu, gpu, gpu:i, cuda or cuda:i")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        here = f"this machine has {count}" if count else "this machine has no GPU; try --device cpu"
        raise ValueError(f"--device {device}: no such GPU, {here}")
    return torch.device("cuda", index)
