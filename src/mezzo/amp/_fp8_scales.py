"""The state of delayed scaling at level O3, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mezzo.fp8 import copies_of, keep_copies
from mezzo.optim import stored_master

_ROLES = ("input", "gradient")


def fp8_scales(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the largest magnitudes of recent calls, for each FP8 layer of a model trained with delayed scaling.

    By the name of the weight: those of its `input` and of the `gradient` of its output, newest call first, on the CPU.
    Save them with weights, optimizer and loss scale to resume training; without them, the first call sets the scale.
    Waits for the device.

    >>> fp8_scales(nn.Linear(2, 2))
    {}
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        kept = copies_of(param)
        if kept is not None:
            amaxes = {role: each.amaxes.cpu() for role, each in kept.histories.items() if not each.is_empty}
            # Compiled layers that share an input learn in the history of the first of them; others have only zeros.
            learnt = {role: values for role, values in amaxes.items() if values.any()}
            found |= {name: learnt} if learnt else {}
    return found


def load_fp8_scales(model: nn.Module, scales: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore what `fp8_scales` returned; everything is checked before anything changes.

    Args:
        model: Decorated at O3, with the names of the saved model.
        scales: From `fp8_scales`, or from a checkpoint.

    Raises:
        ValueError: They belong to another model, or are not from `fp8_scales`.
    """
    params = dict(model.named_parameters())
    for name, learnt in scales.items():
        if name not in params:
            raise ValueError(
                f"FP8 scales: {name!r} is not a parameter of this model; the scales belong to another model"
            )
        fits = all(role in _ROLES and _are_amaxes(amaxes) for role, amaxes in learnt.items())
        if not fits or params[name].dim() != 2:
            raise ValueError(f"FP8 scales: the entry of {name!r} is not from fp8_scales()")
        if stored_master(params[name]) is None:
            raise ValueError(f"FP8 scales: {name!r} is not half with a master; decorate the model at O3 first")
    for name, learnt in scales.items():
        kept = keep_copies(params[name])
        assert kept is not None
        for role, amaxes in learnt.items():
            kept.history(role, len(amaxes)).load(amaxes)


def _are_amaxes(value: object) -> bool:
    is_line = isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() == 1 and len(value) > 0
    return is_line and bool((value.isfinite() & (value >= 0)).all())  # type: ignore[attr-defined, operator]
