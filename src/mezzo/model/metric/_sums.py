"""Sums that stay on the device and are added over processes once."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceSums:
    """A vector of sums on a device; base class of the metrics.

    Args:
        size: Number of sums.
        dtype: Dtype of the sums.
        device: Device of the sums.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._sums = torch.zeros(size, dtype=dtype, device=device)
        self._is_reduced = False

    @property
    def device(self) -> torch.device:
        """Device of the sums."""
        return self._sums.device

    def reset(self) -> None:
        """Start again from zero."""
        self._sums.zero_()
        self._is_reduced = False

    def reduce(self) -> None:
        """Replace the sums by those of all processes, in every process; does nothing without torch.distributed.

        A second call does nothing.
        """
        if self._is_reduced:
            return
        self._is_reduced = True
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self._sums, op=distributed.ReduceOp.SUM)

    def _open_sums(self) -> Tensor:
        """Return the sums to add to; raise ValueError after `reduce`."""
        if self._is_reduced:
            raise ValueError("update after reduce: this metric holds the sums of all processes; call reset() first")
        return self._sums


class Counts(DeviceSums):
    """Integer counts on a device."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        super().__init__(size, torch.int64, device)

    def add(self, numbers: Tensor) -> None:
        """Add a vector to the counts."""
        self._open_sums().add_(numbers)

    def add_ones(self, places: Tensor) -> None:
        """Add 1 at each index; an index may occur more than once."""
        sums = self._open_sums()
        # Not bincount: on CUDA it reads the largest value from the device.
        sums.scatter_add_(0, places, sums.new_ones(()).expand(places.shape))

    def read(self) -> Tensor:
        """Return the counts on the host; waits for the device."""
        return self._sums.cpu()
