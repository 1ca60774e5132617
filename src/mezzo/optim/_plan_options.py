"""The options of parameter groups as the Triton update reads them.

Numbers on the device, compile-time switches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from mezzo.optim import _fused, _triton_launch
from mezzo.optim import _triton_table as columns


@dataclass(slots=True)
class GroupOptions:
    """One parameter group."""

    numbers: tuple[float, ...]
    switches: tuple[tuple[str, bool], ...]
    lr_tensor: Tensor | None = None
    """The learning rate if it is on the device."""

    @property
    def has_momentum(self) -> bool:
        """Whether SGD keeps a momentum buffer."""
        return dict(self.switches)["HAS_MOMENTUM"]


def read_group(group: dict[str, Any], kind: type[Optimizer]) -> GroupOptions:
    """Return the options of a group of SGD, Adam or AdamW."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    rate = 0.0 if on_device else float(lr)
    decay = group["weight_decay"]
    switches = {"DECAYS": bool(decay != 0), "MAXIMIZE": bool(group["maximize"])}
    numbers: tuple[float, ...]
    if kind is SGD:
        numbers = (rate, decay, group["momentum"], 1 - group["dampening"])
        switches |= {"HAS_MOMENTUM": bool(group["momentum"] != 0), "NESTEROV": bool(group["nesterov"])}
    else:
        beta1, beta2 = group["betas"]
        numbers = (rate, decay, 1 - beta1, beta2, 1 - beta2, group["eps"], _log(beta1), _log(beta2))
        switches["DECOUPLED"] = bool(group.get("decoupled_weight_decay", kind is AdamW))
    return GroupOptions(numbers, tuple(sorted(switches.items())), lr if on_device else None)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


class OptionTable:
    """The numbers of all parameter groups on the device; sent again when they change."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._kind = type(optimizer)
        self.groups = [read_group(group, self._kind) for group in optimizer.param_groups]
        shape = len(self.groups), columns.OPTIONS.value
        self.on_device = torch.empty(shape, dtype=torch.float64, device=device)
        self._upload()

    @property
    def lr_tensors(self) -> list[Tensor]:
        """The learning rates that are on the device."""
        return [group.lr_tensor for group in self.groups if group.lr_tensor is not None]

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Send numbers that changed.

        Return False if more changed than numbers, and a plan must be built again.

        Raises:
            RuntimeError: Numbers changed while a CUDA graph is captured.
        """
        if not all([_fused.covers_options(group) for group in param_groups]):
            return False
        groups = [read_group(group, self._kind) for group in param_groups]
        changed = False
        for old, new in zip(self.groups, groups, strict=True):
            if old.switches != new.switches or old.lr_tensor is not new.lr_tensor:
                return False
            changed |= old.numbers != new.numbers
        if changed:
            if _triton_launch.is_capturing(self.on_device.device):
                raise RuntimeError("the optimizer's options changed since its last step: take one before capturing it")
            self.groups = groups
            self._upload()
        return True

    def _upload(self) -> None:
        numbers = np.zeros(self.on_device.shape)
        for row, group in zip(numbers, self.groups, strict=True):
            row[: len(group.numbers)] = group.numbers
        _triton_launch.upload(numbers, self.on_device)
