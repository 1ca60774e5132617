"""The dynamic loss-scaling state machine: one update, on the device, in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mezzo._torch.step_tier import uses_triton
from mezzo.optim._check import Verdict

#: The elements of `counts`, int32.
COUNTERS = ("incr_count", "decr_count", "skipped_steps", "skips_at_floor")


class Rule(Protocol):
    """When the scale grows and shrinks; by Paddle's names."""

    @property
    def incr_ratio(self) -> float: ...
    @property
    def decr_ratio(self) -> float: ...
    @property
    def incr_every_n_steps(self) -> int: ...
    @property
    def decr_every_n_nan_or_inf(self) -> int: ...
    @property
    def min_loss_scaling(self) -> float: ...


def rescale(verdict: Verdict, scale: Tensor, counts: Tensor, rule: Rule, dynamic: bool) -> Tensor:
    """Count one update and, if dynamic, change the scale.

    Args:
        verdict: Of all steps since the last update.
        scale: 0-dim float32, changed in place.
        counts: `COUNTERS`, int32, changed in place.
        rule: When the scale grows and shrinks.
        dynamic: False: only count, the scale stays.

    Returns:
        A report for the host, float32: bad, scale, bad steps in a row at the minimum, first bad
        parameter.
    """
    if uses_triton(scale.device):
        from mezzo.optim import _triton_launch

        packed = verdict.packed
        if packed is None:
            packed = torch.stack([verdict.found_inf, verdict.first_bad.float()])
        return _triton_launch.rescale(packed, scale, counts, rule, dynamic)
    bad = verdict.found_inf > 0
    goods, bads, skipped, at_floor = counts.unbind()
    at_floor.add_(1).mul_(bad & (scale <= rule.min_loss_scaling))
    skipped.add_(bad)
    if dynamic:
        _move(scale, goods, bads, bad, rule)
    return torch.stack([verdict.found_inf, scale, at_floor, verdict.first_bad])


def _move(scale: Tensor, good_count: Tensor, bad_count: Tensor, bad: Tensor, rule: Rule) -> None:
    # Products with flags: where() would copy a number to the device, which synchronises.
    goods = (good_count + 1) * ~bad
    bads = (bad_count + 1) * bad
    # A threshold of 0 never fires: the counter of the running kind is at least 1.
    shrinks = bad & (bads == rule.decr_every_n_nan_or_inf)
    grows = ~bad & (goods == rule.incr_every_n_steps)
    smaller = (scale * rule.decr_ratio).clamp(min=rule.min_loss_scaling)
    larger = scale * rule.incr_ratio
    scale.copy_(torch.where(shrinks, smaller, torch.where(grows & larger.isfinite(), larger, scale)))
    good_count.copy_(goods * ~grows)
    bad_count.copy_(bads * ~shrinks)
