"""The table of addresses by which Triton kernels find the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.optim import _triton_launch
from mezzo.optim import _triton_table as columns
from mezzo.optim._plan_watch import PlanEntry

Member = tuple[int, PlanEntry]
"""The number of a parameter group, and a parameter of it."""


def addresses_of(members: Sequence[Member], lr_tensors: Sequence[Tensor | None]) -> Any:
    """Return the rows of a table, without the gradients.

    Args:
        members: The parameters, in the order of the rows.
        lr_tensors: Per parameter group, the learning rate if it is on the device.
    """
    table = np.zeros((len(members), columns.COLUMNS.value), dtype=np.int64)
    for row, (number, entry) in zip(table, members, strict=True):
        has_master = entry.target is not entry.param
        moments = [t.data_ptr() for key, t in entry.state.items() if key != "step"]
        lr = lr_tensors[number]
        row[columns.TARGET.value] = entry.target.data_ptr()
        row[columns.HALF.value] = entry.param.data_ptr() if has_master else 0
        row[columns.STATE_A.value : columns.STATE_A.value + len(moments)] = moments
        row[columns.STEP.value] = entry.state["step"].data_ptr() if "step" in entry.state else 0
        row[columns.LR.value] = 0 if lr is None else lr.data_ptr()
        row[columns.NUMEL.value] = entry.target.numel()
        row[columns.GROUP.value] = number
        row[columns.INDEX.value] = entry.index
        if entry.copies is not None:
            row[columns.WIDTH.value] = entry.target.shape[1]
            row[columns.VALUES.value] = entry.copies.values.data_ptr()
            row[columns.TRANSPOSED.value] = entry.copies.transposed.data_ptr()
            row[columns.COPY_STATE.value] = entry.copies.state.data_ptr()
    return table


class AddressTable:
    """The table on the device.

    Gradients may be at other addresses in each step: then it is sent again.

    A CUDA graph contains the copy of the addresses that it was captured with, and its replays leave
    them here.
    """

    def __init__(self, addresses: Any, device: torch.device) -> None:
        self._host = addresses
        self._grads_at: list[int] = []
        self.on_device = torch.empty(addresses.shape, dtype=torch.int64, device=device)
        self._kept_for_replay: list[Tensor] = []
        self._was_capturing = False
        self._staged = self._pinned()

    def _pinned(self) -> Tensor | None:
        """Return host memory for a table that a CUDA graph copies.

        Allocated before a capture, not during one.
        """
        if self.on_device.device.type != "cuda":
            return None
        return torch.empty(self._host.shape, dtype=torch.int64, pin_memory=True)

    def send_grads(self, grads_at: list[int]) -> None:
        """Bring the addresses of the gradients to the device, if it does not have them.

        Raises:
            RuntimeError: A second capture without an eager step in between.
        """
        is_capturing = _triton_launch.is_capturing(self.on_device.device)
        # A graph sends its own addresses, once. After a replay the table holds those, and is sent
        # again.
        must_send = not self._was_capturing if is_capturing else bool(self._kept_for_replay)
        if must_send or grads_at != self._grads_at:
            self._grads_at = grads_at
            self._host[:, columns.GRAD.value] = grads_at
            if is_capturing:
                self._send_by_graph()
            else:
                self._send()
        self._was_capturing = is_capturing

    def _send(self) -> None:
        _triton_launch.upload(self._host, self.on_device)
        if self._staged is None:
            self._staged = self._pinned()

    def _send_by_graph(self) -> None:
        if self._staged is None:
            raise RuntimeError(
                "an optimizer's step can be captured once, and again after an eager step: take one between two captures"
            )
        # A replay copies from the same memory again, so it must stay allocated and unchanged.
        staged, self._staged = self._staged, None
        staged.copy_(torch.from_numpy(self._host))
        self._kept_for_replay.append(staged)
        self.on_device.copy_(staged, non_blocking=True)
