"""Running statistics that a skipped step does not poison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class NormGuard:
    """Keeps the statistics of a model's normalisation layers as they were after its last good step.

    A forward pass changes them before anyone knows that the step will overflow; `settle` takes that back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._kept: list[Tensor] = []
        self.refresh()
        for module in self._modules:
            module.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.refresh()

    def _live(self) -> list[Tensor]:
        return [b for m in self._modules for name in _BUFFERS if (b := getattr(m, name, None)) is not None]

    def refresh(self) -> None:
        """Take the statistics as they are for those of the last good step."""
        self._kept = [buffer.detach().clone() for buffer in self._live()]

    @torch.no_grad()
    def settle(self, found_inf: Tensor) -> None:
        """Restore the statistics if the step was bad, keep the new ones otherwise; decided on the device."""
        live = self._live()
        bad = found_inf > 0
        # Buffers are looked up each time: model.to(device) replaces them.
        self._kept = [k.to(b.device) for k, b in zip(self._kept, live, strict=True)]
        right = [torch.where(bad.to(b.device, non_blocking=True), k, b) for k, b in zip(self._kept, live, strict=True)]
        if live:  # both in place, so that a captured step works on the same memory each time
            torch._foreach_copy_(live, right)
            torch._foreach_copy_(self._kept, right)
