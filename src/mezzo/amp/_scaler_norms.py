"""Running statistics of normalisation layers that a skipped step does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._torch.foreach import foreach_copy_
from mezzo._torch.layers import NormBase

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class NormGuard:
    """Keeps the statistics of a model's normalisation layers from after its last good step.

    A forward pass changes them before the overflow of its step is known; `settle` restores them.
    Buffers of one device and dtype are joined into one tensor, so that hundreds of them need a few
    launches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, NormBase) and m.track_running_stats]
        self._kept: dict[_Kind, Tensor] = {}
        self._kinds: list[_Kind] = []
        self.refresh()
        for module in self._modules:
            module.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.refresh()

    def _live(self) -> list[Tensor]:
        return [b for m in self._modules for name in _BUFFERS if (b := getattr(m, name, None)) is not None]

    def refresh(self) -> None:
        """Keep the current statistics as those of the last good step."""
        self._keep(self._live())

    def _keep(self, values: Sequence[Tensor]) -> None:
        kinds = [_kind(value) for value in values]
        joined = {kind: _join(some) for kind, some in _by_kind(values).items()}
        if kinds == self._kinds:  # in place: a captured step works on this memory
            for kind, value in joined.items():
                self._kept[kind].copy_(value)
        else:
            self._kinds, self._kept = kinds, joined

    def _follow(self, live: Sequence[Tensor]) -> None:
        """Move the kept statistics to the devices and dtypes of the buffers.

        `model.to(device)` replaces buffers.
        """
        pieces = {kind: iter(self._split(kind)) for kind in self._kept}
        kept = [next(pieces[kind]) for kind in self._kinds]
        self._keep([value.to(buffer).view_as(buffer) for value, buffer in zip(kept, live, strict=True)])

    def _split(self, kind: _Kind) -> Sequence[Tensor]:
        sizes = [buffer.numel() for buffer in self._live()]
        return torch.split(self._kept[kind], [size for size, k in zip(sizes, self._kinds, strict=True) if k == kind])

    @torch.no_grad()
    def settle(self, found_inf: Tensor) -> None:
        """Restore the statistics if the step was bad, keep the new ones otherwise.

        Decided on the device.
        """
        live = self._live()
        if [_kind(buffer) for buffer in live] != self._kinds:
            self._follow(live)
        bad = found_inf > 0
        for kind, buffers in _by_kind(live).items():
            kept = self._kept[kind]
            right = torch.where(bad.to(kept.device, non_blocking=True), kept, _join(buffers))
            pieces = right.split([buffer.numel() for buffer in buffers])
            # Both in place, so that a captured step works on the same memory each time.
            foreach_copy_(buffers, [p.view_as(b) for p, b in zip(pieces, buffers, strict=True)])
            kept.copy_(right)


_Kind = tuple[torch.device, torch.dtype]


def _kind(buffer: Tensor) -> _Kind:
    return buffer.device, buffer.dtype


def _by_kind(buffers: Sequence[Tensor]) -> dict[_Kind, list[Tensor]]:
    found: dict[_Kind, list[Tensor]] = {}
    for buffer in buffers:
        found.setdefault(_kind(buffer), []).append(buffer)
    return found


def _join(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
