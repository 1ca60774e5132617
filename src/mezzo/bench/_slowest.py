"""The kernels of a training step that take the most time, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mezzo._torch.profiler import DeviceType
from mezzo.record import synchronize

PROFILED_STEPS = 3


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel's share of a step."""

    name: str
    """On a CPU the name of an operator."""
    calls: float
    """Per step."""
    seconds: float
    """Per step, all calls together."""


def slowest_kernels(step: Callable[[], object], device: torch.device, most: int) -> tuple[KernelTime, ...]:
    """Return the sum of all kernels of a step as the first entry, then the slowest kernels.

    Call it after everything else was timed: torch's profiler stays attached to the driver, and later
    launches take longer.

    Args:
        step: Trains one step.
        device: Where the step runs.
        most: How many kernels.
    """
    on_gpu = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    synchronize(device)
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(device)
    found: dict[str, list[float]] = {}
    for event in profile.events():
        is_kernel = event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
        if is_kernel and not getattr(event, "is_user_annotation", False):
            spent = event.device_time_total if on_gpu else event.self_cpu_time_total
            found.setdefault(event.name, []).append(spent)
    times = [
        KernelTime(name, len(spent) / PROFILED_STEPS, sum(spent) / PROFILED_STEPS / 1e6)
        for name, spent in found.items()
    ]
    total = KernelTime("all", sum(each.calls for each in times), sum(each.seconds for each in times))
    return total, *sorted(times, key=lambda each: -each.seconds)[:most]
