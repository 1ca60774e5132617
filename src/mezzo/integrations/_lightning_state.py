"""Questions to a running Trainer; `lightning` is the distribution that it comes from."""

from __future__ import annotations

import importlib
from typing import Any

import torch


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


def has_several_ranks() -> bool:
    """Whether this process is one of several in a process group."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
