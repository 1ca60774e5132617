"""The stock side of the benchmarks: torch.amp as its documentation writes it."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class StockPrecision:
    """torch.amp with the calls of `mezzo.Precision`, so that both sides run the same loop."""

    def __init__(self, device: str, dtype: str) -> None:
        self._scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
        half = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        self._region = torch.autocast(device, dtype=half, enabled=dtype != "float32")

    def autocast(self) -> torch.autocast:
        """Return the region for the forward pass and the loss."""
        return self._region

    def backward(self, loss: Tensor) -> None:
        """Compute scaled gradients."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Unscale and clip if asked, then step and update the scale."""
        if max_norm is not None:
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
