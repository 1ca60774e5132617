"""How the loss scaler reaches the step of an optimizer.

Its engine, steps without a scale, scales on an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mezzo.optim import (
    StepEngine,
    engine_of,
    forget_casts,
    keep_autocast,
    outside_autocast,
    split_closure,
    unwrap_optimizer,
)


def checked_engine(optimizer: Any) -> StepEngine:
    """Return the engine of an optimizer, of the one inside a wrapper, or of an object with its methods.

    Raises:
        TypeError: It is neither.
    """
    names = ("param_groups", "step", "zero_grad")
    if not isinstance(optimizer, Optimizer) and not all(hasattr(optimizer, name) for name in names):
        raise TypeError(
            f"expected a torch.optim.Optimizer, or an object with param_groups, step and zero_grad (apex's LARC); "
            f"got {type(optimizer).__name__}"
        )
    return engine_of(unwrap_optimizer(optimizer))


def step_without_scale(engine: StepEngine, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the step of an optimizer or its wrapper outside of autocast; its closure runs inside."""
    step: Any = optimizer.step
    if engine.attached:
        return step(*args, **kwargs)
    closure, _, _ = split_closure(args, kwargs)
    if closure is not None:
        kept = keep_autocast(closure)
        args = tuple(kept if value is closure else value for value in args)
        kwargs = {name: kept if value is closure else value for name, value in kwargs.items()}
    with outside_autocast():
        result = step(*args, **kwargs)
    forget_casts()
    return result


def multiply_scale(scale: Tensor | None, grad_scale: Any) -> Tensor | None:
    """Return a scale times the `grad_scale` that a user set on the optimizer, as torch does."""
    if grad_scale is None:
        return scale
    factor: Tensor = torch.as_tensor(grad_scale, dtype=torch.float32)
    with outside_autocast():
        return factor if scale is None else scale * factor.to(scale.device, non_blocking=True)
