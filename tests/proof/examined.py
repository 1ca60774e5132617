"""Examinations made by hand: times and kernels are given, nothing runs."""

import torch
from torch import nn

from mezzo.amp.debugging import KernelRow, OperatorStats
from mezzo.proof._examination import Examination
from mezzo.proof._measure import Measured, Observed
from mezzo.record import Timing
from mezzo.trial import TrialSetup, Workload


def kernel(
    op: str = "add", ms: float = 1.0, *, dtype: str = "float16", is_cast: bool = False, calls: int = 1
) -> KernelRow:
    return KernelRow(f"{op}_kernel", op, "forward", "layer", op, dtype, is_cast, False, calls, 1e3 * ms)


def stats_of(kernels: list[KernelRow]) -> OperatorStats:
    stats = OperatorStats()
    stats.kernels = kernels
    return stats


def observed(kernels: list[KernelRow], *, is_cuda: bool = True) -> Observed:
    return Observed(TrialSetup(), stats_of(kernels), (), is_cuda)


def measured(
    kernels: list[KernelRow],
    *,
    step_ms: float,
    host_ms: float,
    is_cuda: bool = True,
    skipped: int = 0,
    scale: float = 2.0**15,
) -> Measured:
    return Measured(
        setup=TrialSetup(),
        stats=stats_of(kernels),
        products=(),
        is_cuda=is_cuda,
        timing=Timing((step_ms / 1e3,)),
        host_s=host_ms / 1e3,
        losses=(1.0,),
        num_skipped=skipped,
        last_scale=scale,
    )


def examination(
    amp: Measured,
    full: Measured | None = None,
    *,
    capability: tuple[int, int] | None = (9, 0),
    setup: TrialSetup | None = None,
    **more: object,
) -> Examination:
    workload = Workload(nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1, 2), nn.functional.mse_loss)
    device = torch.device("cuda" if amp.is_cuda else "cpu")
    seen = Examination(workload, setup or TrialSetup(), device, 1, capability, **more)
    seen.__dict__.update(amp=amp, full=full or amp, product_speedup=10.0, copy_bandwidth=1e12)
    return seen
