"""A mean over many steps that stays on the device until it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo.model.metric._sums import DeviceSums


class RunningMean(DeviceSums):
    """A weighted mean in float64, so that long sums stay accurate.

    Args:
        device: Device of the values.

    >>> loss = RunningMean("cpu")
    >>> loss.update(torch.tensor(1.0), weight=3)
    >>> loss.update(5.0)
    >>> loss.value()
    2.0
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(2, torch.float64, device)  # weighted sum, weight

    def update(self, value: Tensor | float, weight: float = 1) -> None:
        """Add a value: one number, on the device or the host. The host does not wait for the device."""
        sums = self._open_sums()
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"one number is added at a time; this tensor is {tuple(value.shape)}")
            value = value.detach().double().reshape(())
        sums[0] += value * weight
        sums[1] += weight

    def sum(self) -> float:
        """Return the weighted sum; waits for the device."""
        return float(self._sums[0].item())

    def value(self) -> float:
        """Return the mean; waits for the device.

        Raises:
            ValueError: Nothing was added.
        """
        total, weight = self._sums.tolist()
        if not weight:
            raise ValueError("nothing was added: a mean needs at least one value with a weight")
        mean: float = total / weight
        return mean
