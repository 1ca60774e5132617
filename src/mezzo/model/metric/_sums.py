"""Sums that stay on the device, and are added up over processes once."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceSums:
    """A row of numbers on a device; base of the metrics.

    Args:
        size: How many numbers.
        dtype: Of the numbers.
        device: Where they stay.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._sums = torch.zeros(size, dtype=dtype, device=device)
        self._is_reduced = False

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self._sums.device

    def reset(self) -> None:
        """Start again from zero."""
        self._sums.zero_()
        self._is_reduced = False

    def reduce(self) -> None:
        """Add up the numbers of all processes, in every process; without torch.distributed nothing happens.

        A second call changes nothing: what was added up once is not added up again.
        """
        if self._is_reduced:
            return
        self._is_reduced = True
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self._sums, op=distributed.ReduceOp.SUM)

    def _open_sums(self) -> Tensor:
        """Return the numbers to add to; refused where they are those of all processes already."""
        if self._is_reduced:
            raise ValueError("update after reduce: this metric holds the sums of all processes; call reset() first")
        return self._sums


class Counts(DeviceSums):
    """Whole numbers on a device that are only ever added to."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        super().__init__(size, torch.int64, device)

    def add(self, numbers: Tensor) -> None:
        """Add to all of them."""
        self._open_sums().add_(numbers)

    def add_ones(self, places: Tensor) -> None:
        """Add 1 at each of the places; a place may come more than once."""
        sums = self._open_sums()
        # Not bincount: on CUDA it asks the device for the largest value.
        sums.scatter_add_(0, places, sums.new_ones(()).expand(places.shape))

    def read(self) -> Tensor:
        """Return them on the host; waits for the device."""
        return self._sums.cpu()
