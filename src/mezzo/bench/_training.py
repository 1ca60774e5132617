"""The training loop of the benchmarks, with mezzo and with torch.amp as its documentation writes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.precision import Precision
from mezzo.trial import Workload


class StockPrecision:
    """torch.amp with the calls of `mezzo.Precision`, so that both sides run the same loop."""

    def __init__(self, device: str, dtype: str) -> None:
        self._scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
        half = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        self._region = torch.autocast(device, dtype=half, enabled=dtype != "float32")

    @property
    def scale(self) -> float | None:
        """The loss scale; None without scaling. Waits for the device."""
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

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


class TrainingLoop:
    """The training loop as users write it, with mezzo or with stock torch.

    Args:
        workload: The model, its batch and its loss.
        optimizer: Prepared together with the model.
        precision: `Precision` or `StockPrecision`.
        max_norm: Clips the norm of the gradients; None: no clipping.
        keeps_grads: Set gradients to zero instead of freeing them.
        compile_mode: Mode of torch.compile for the model; None: eager.
        compiles_loss: torch.compile gets model and loss as one function, not only the model.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: Optimizer,
        precision: Precision | StockPrecision,
        *,
        max_norm: float | None = None,
        keeps_grads: bool = False,
        compile_mode: str | None = None,
        compiles_loss: bool = False,
    ) -> None:
        self.workload, self.optimizer, self.precision = workload, optimizer, precision
        self._max_norm, self._keeps_grads = max_norm, keeps_grads
        model: Callable[[Any], Any] = workload.model
        if compile_mode is not None and not compiles_loss:
            model = torch.compile(workload.model, mode=compile_mode)

        def compute(inputs: Any, targets: Any) -> Tensor:
            return workload.loss_fn(model(inputs), targets)

        self._compute: Callable[[Any, Any], Tensor] = compute
        if compile_mode is not None and compiles_loss:
            self._compute = torch.compile(compute, mode=compile_mode)

    def forward(self, batch: tuple[Any, Any] | None = None) -> Tensor:
        """Return the unscaled loss of a batch (inputs and targets); None: that of the workload."""
        inputs, targets = (self.workload.inputs, self.workload.targets) if batch is None else batch
        with self.precision.autocast():
            return self._compute(inputs, targets)

    def step(self, batch: tuple[Any, Any] | None = None) -> Tensor:
        """Train one step; the loss stays on the device."""
        loss = self.forward(batch)
        self.precision.backward(loss)
        self.precision.step(self.optimizer, max_norm=self._max_norm)
        self.optimizer.zero_grad(set_to_none=not self._keeps_grads)
        return loss.detach()
