"""How far each optimizer is since the last update of the scaler, and what its gradients showed."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from mezzo.optim import Verdict, outside_autocast


class Stage(enum.Enum):
    """What the scaler has done with the gradients of one optimizer."""

    INIT = 0
    UNSCALED = 1
    STEPPED = 2


class OptimizerProgress:
    """How far one optimizer is since the last update."""

    def __init__(self) -> None:
        self.stage = Stage.INIT
        self.verdict: Verdict | None = None
        self.clip_coef: Tensor | None = None

    @property
    def is_begun(self) -> bool:
        """Whether a copy of the scaler would lose something: a stage or a verdict."""
        return self.stage is not Stage.INIT or self.verdict is not None


def merge_verdicts(old: Verdict | None, new: Verdict) -> Verdict:
    """Return a verdict that is bad if either is.

    Gradients rewritten in between may hide what the first one saw.
    """
    if old is None:
        return new
    with outside_autocast():
        found_inf = torch.maximum(old.found_inf, new.found_inf)
        first_bad = torch.where(old.first_bad >= 0, old.first_bad, new.first_bad)
    return Verdict(found_inf, first_bad, new.total_norm, new.clip_coef)


def verdict_of_all(verdicts: list[Verdict], device: torch.device) -> Verdict:
    """Return one verdict for several optimizers, on the scaler's device."""
    found = [verdict.found_inf.to(device, non_blocking=True) for verdict in verdicts]
    if len(verdicts) == 1 and found[0] is verdicts[0].found_inf:
        return verdicts[0]
    return Verdict(torch.stack(found).amax(), verdicts[0].first_bad.to(device, non_blocking=True))
