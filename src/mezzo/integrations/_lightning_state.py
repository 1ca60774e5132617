"""Questions to a running Trainer or Fabric; `lightning` is the distribution that it comes from."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.dtypes import HALF_DTYPES
from mezzo.optim import master_of


def trainer_of(lightning: Any, module: Any) -> Any:
    """Return the Trainer that runs a module; None if Fabric does."""
    if not isinstance(module, lightning.LightningModule):
        return None
    try:
        trainer = module.trainer
    except RuntimeError:  # attached to nothing: Fabric.setup is about to do it
        return None
    return trainer if isinstance(trainer, lightning.Trainer) else None


def shows_gradients(lightning: Any, model: Any) -> bool:
    """Whether a hook that runs before the optimizer's step may look at gradients."""
    is_overridden = importlib.import_module("lightning_utilities.core.overrides").is_overridden
    hook = "on_before_optimizer_step"
    if any(is_overridden(hook, callback, lightning.Callback) for callback in model.trainer.callbacks):
        return True
    hooks = (hook, "configure_gradient_clipping")
    return any(is_overridden(name, model, lightning.LightningModule) for name in hooks)


def dtypes_of(module: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of all parameters."""
    return [param.dtype for param in module.parameters()]


def masters_of(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that have masters, with them."""
    found = [(param, master_of(param)) for param in module.parameters()]
    return [(param, master) for param, master in found if master is not None]


def grads_wait(modules: Iterable[nn.Module], stepped: Iterable[Optimizer]) -> bool:
    """Whether there are gradients that none of these optimizers has used: another one may step next."""
    used = {id(param) for optimizer in stepped for group in optimizer.param_groups for param in group["params"]}
    return any(p.grad is not None and id(p) not in used for module in modules for p in module.parameters())


def has_several_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def float32_of(data: Any) -> Any:
    """Return a collection with its half tensors as float32."""
    apply = importlib.import_module("lightning_utilities.core.apply_func").apply_to_collection
    return apply(data, Tensor, lambda value: value.float() if value.dtype in HALF_DTYPES else value)
