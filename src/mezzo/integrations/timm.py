"""timm's training script with mezzo: a loss scaler and an autocast with its calls, and averages of masters.

In a copy of timm's `train.py`, after the optimizer is created and before anything is resumed or wrapped::

    amp_autocast, loss_scaler = setup_amp(model, optimizer, "O2", args.amp_dtype)
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import GradScaler, float32_copy, master_parameters
from mezzo.errors import require, unknown_choice
from mezzo.optim import master_of
from mezzo.precision import Precision

__all__ = ["MezzoScaler", "setup_amp", "model_ema"]

CLIP_MODES = ("norm", "value", "agc")
"""Modes of timm's `--clip-mode`."""


class MezzoScaler:
    """Takes a training step as timm's `NativeScaler` does, in float16 and in bfloat16.

    Args:
        precision: Has prepared the model and the optimizer.
    """

    state_dict_key = "amp_scaler"
    """timm's key in checkpoints: scales of its own scaler can be resumed."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self._scaler = precision.scaler or GradScaler(enable=False)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Compute gradients of the scaled loss; clip true gradients and take the step.

        Args:
            loss: The unscaled loss.
            optimizer: The optimizer that was prepared.
            clip_grad: Norm, value or factor to clip by; None does not clip.
            clip_mode: `norm`, `value` or `agc` (adaptive; compares gradients with float32 masters).
            parameters: What to clip; None: all parameters of the optimizer.
            create_graph: For optimizers of second order.
            need_update: False only accumulates gradients.

        Raises:
            ValueError: `clip_mode` is unknown.
        """
        if clip_mode not in CLIP_MODES:
            raise ValueError(unknown_choice("clip_mode", clip_mode, CLIP_MODES))
        self.precision.backward(loss, create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is None:
            self.precision.step(optimizer)
            return
        chosen = None if parameters is None else list(parameters)
        if clip_mode == "norm" and _covers(chosen, optimizer):
            self.precision.step(optimizer, max_norm=clip_grad)
            return
        self._scaler.unscale_(optimizer)
        _clip(_params_of(optimizer) if chosen is None else chosen, clip_grad, clip_mode)
        self.precision.step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale; empty without one."""
        return self.precision.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of this scaler, or of timm's `NativeScaler`."""
        self.precision.load_state_dict(state_dict)


def setup_amp(
    model: nn.Module,
    optimizer: Optimizer,
    level: str = "O2",
    dtype: str | torch.dtype = "float16",
    *,
    fuse: bool = False,
    **options: Any,
) -> tuple[Callable[[], AbstractContextManager[Any]], MezzoScaler]:
    """Prepare model and optimizer in place; return timm's `amp_autocast` and `loss_scaler`.

    Call it before a checkpoint is resumed, an average is made, or DDP wraps the model.

    Args:
        model: The model, on its device.
        optimizer: Its optimizer.
        level: `O1`, `O2` or `O3`; see `mezzo.Precision`.
        dtype: `float16` or `bfloat16`, as `--amp-dtype`.
        fuse: See `Precision.prepare`.
        options: Other arguments of `mezzo.Precision`.
    """
    precision = Precision(level, dtype, **options)
    precision.prepare(model, optimizer, fuse=fuse)
    return precision.autocast, MezzoScaler(precision)


def model_ema(model: nn.Module, **options: Any) -> Any:
    """Return timm's `ModelEmaV3` of the float32 masters of a model; its own weights are float32.

    `ModelEmaV3(model)` of a prepared model computes with half weights, and with `exclude_buffers=True` averages those.

    Args:
        model: A prepared model, not wrapped.
        options: Arguments of `ModelEmaV3`, such as `decay`, `use_warmup`, `device`.

    Raises:
        MissingExtra: timm is not installed.
    """
    require("timm", extra="timm")
    base = importlib.import_module("timm.utils").ModelEmaV3

    class MasterEma(base):  # type: ignore[misc, valid-type]
        def apply_update_no_buffers_(self, model: nn.Module, decay: float) -> None:
            super().apply_update_no_buffers_(_Masters(model), decay)

    device = next(model.parameters()).device
    return MasterEma(float32_copy(model).to(device), **options)


class _Masters:
    """A model whose parameters are float32 masters, as far as an average looks at it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[Tensor]:
        return iter(master_parameters(self._model))

    def buffers(self) -> Iterator[Tensor]:
        return self._model.buffers()


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _covers(chosen: list[Tensor] | None, optimizer: Optimizer) -> bool:
    """Whether all gradients of an optimizer, and no others, are to be clipped."""
    if chosen is None:
        return True
    ids = [{id(param) for param in params if param.grad is not None} for params in (chosen, _params_of(optimizer))]
    return ids[0] == ids[1]


@torch.no_grad()
def _clip(params: list[Tensor], value: float, mode: str) -> None:
    """Clip true gradients by timm's function, in float32 and beside float32 masters."""
    require("timm", extra="timm")
    wide = []
    for param, grad in ((param, param.grad) for param in params):
        if grad is None:
            continue
        master = master_of(param)
        alias = (param if master is None else master).detach()  # another object on the same memory
        alias.grad = grad.to(alias.dtype)
        wide.append((grad, alias))
    importlib.import_module("timm.utils").dispatch_clip_grad([alias for _, alias in wide], value, mode=mode)
    for grad, alias in wide:
        if alias.grad is not None and alias.grad is not grad:
            grad.copy_(alias.grad)
