"""What delayed scaling of level O3 has learnt, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mezzo.fp8 import copies_of, keep_copies
from mezzo.optim import stored_master

_ROLES = ("input", "gradient")


def fp8_scales(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the largest numbers of the last calls, for each FP8 layer of a model that is trained with delayed scaling.

    By the weight's name; of its `input` and of the `gradient` of its output, the newest call first, on the CPU. Together with
    weights, optimizer and loss scale they are what training goes on from; without them it begins with the scale of its first
    call. Waits for the device.

    >>> fp8_scales(nn.Linear(2, 2))
    {}
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters():
        kept = copies_of(param)
        if kept is not None:
            learnt = {role: each.amaxes.cpu() for role, each in kept.histories.items() if not each.is_empty}
            found |= {name: learnt} if learnt else {}
    return found


def load_fp8_scales(model: nn.Module, scales: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Go on with what `fp8_scales` returned; all of it is looked at before anything changes.

    Args:
        model: Decorated at O3; names are those of the model that was saved.
        scales: From `fp8_scales`, or from a checkpoint.

    Raises:
        ValueError: They are not those of this model, or no such numbers.
    """
    params = dict(model.named_parameters())
    for name, learnt in scales.items():
        if name not in params:
            raise ValueError(f"FP8 scales: {name!r} is no parameter of this model; they are those of another one")
        fits = all(role in _ROLES and _are_amaxes(amaxes) for role, amaxes in learnt.items())
        if not fits or params[name].dim() != 2:
            raise ValueError(f"FP8 scales: what is there of {name!r} is not what fp8_scales() returns")
        if stored_master(params[name]) is None:
            raise ValueError(f"FP8 scales: {name!r} is not half with a master; decorate the model at O3 before")
    for name, learnt in scales.items():
        kept = keep_copies(params[name])
        assert kept is not None
        for role, amaxes in learnt.items():
            kept.history(role, len(amaxes)).load(amaxes)


def _are_amaxes(value: object) -> bool:
    is_line = isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() == 1 and len(value) > 0
    return is_line and bool((value.isfinite() & (value >= 0)).all())  # type: ignore[attr-defined, operator]
