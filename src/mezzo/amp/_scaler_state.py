"""The dynamic loss-scaling state machine, as tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mezzo.amp._scaler_rule import ScaleRule
from mezzo.optim import COUNTERS, Verdict, rescale


class ScaleState:
    """Scale and counters; on the host until the first scaled tensor shows their device."""

    counters = COUNTERS

    def __init__(self, scale: float) -> None:
        self._host: dict[str, float] = {"scale": scale, **dict.fromkeys(self.counters, 0)}
        self._device_scale: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """The scale, 0-dim float32."""
        assert self._device_scale is not None
        return self._device_scale

    @property
    def is_placed(self) -> bool:
        """Whether the state is on a device."""
        return self._device_scale is not None

    @property
    def device(self) -> torch.device:
        """Where the state is."""
        return self.scale.device

    def place(self, device: torch.device) -> None:
        """Move to the device, the first time; by fills, as copies from the host may synchronise."""
        if self._device_scale is not None:
            return
        self._device_scale = torch.full((), self._host["scale"], dtype=torch.float32, device=device)
        self._counts = torch.empty(len(self.counters), dtype=torch.int32, device=device)
        self._fill_counts()

    def _fill_counts(self) -> None:
        assert self._counts is not None
        for place, name in zip(self._counts.unbind(), self.counters, strict=True):
            place.fill_(int(self._host[name]))

    def scale_on(self, device: torch.device) -> Tensor:
        """Return the scale on a device; on its own device the live tensor itself."""
        return self.scale.to(device, non_blocking=True)

    def advance(self, verdict: Verdict, rule: ScaleRule, dynamic: bool) -> Tensor:
        """Count one update and, if dynamic, change the scale.

        Return the report of `mezzo.optim.rescale`.
        """
        assert self._counts is not None
        return rescale(verdict, self.scale, self._counts, rule, dynamic)

    def known_scale(self) -> float | None:
        """Return the scale; None if reading it would wait for the device."""
        if self._device_scale is None:
            return self._host["scale"]
        return float(self._device_scale.item()) if self._device_scale.device.type == "cpu" else None

    def placed_scale(self) -> float:
        """Return the scale that was set or loaded last; updates on the device are newer."""
        return self._host["scale"]

    def read(self) -> dict[str, float]:
        """Return all values as plain numbers; waits for the device."""
        if self._counts is None:
            return dict(self._host)
        counts = dict(zip(self.counters, self._counts.tolist(), strict=True))
        return {"scale": float(self.scale.item()), **counts}

    def write(self, values: Mapping[str, float]) -> None:
        """Set all values; tensors on the device are changed in place."""
        self._host = dict(values)
        if self._device_scale is None:
            return
        self.scale.fill_(self._host["scale"])
        self._fill_counts()

    def set_scale(self, scale: float) -> None:
        """Set only the scale."""
        self._host["scale"] = scale
        if self._device_scale is not None:
            self._device_scale.fill_(scale)
