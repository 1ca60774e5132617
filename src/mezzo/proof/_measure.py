"""Measure a training step: its time, the host time, and its recorded kernels."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mezzo.fp8 import make_operand, multiply
from mezzo.proof._products import Product, ProductSink, is_product
from mezzo.record import (
    FP8,
    Fp8Row,
    KernelRow,
    OperatorStats,
    Timing,
    collect_fp8_numbers,
    collect_operator_stats,
    listening,
    release_memory,
    synchronize,
    time_on_device,
)
from mezzo.trial import Trial, TrialSetup, Workload

WARMUP_STEPS = 3
HOST_CALLS = 5
CPU_RECORDINGS = 3
_COPY_BYTES = 2**28
_PRODUCT_SIZE = 4096


@dataclass(frozen=True)
class Observed:
    """One recorded step of a setup, not timed."""

    setup: TrialSetup
    stats: OperatorStats
    """With kernels and leaks; empty for a captured step."""
    products: tuple[Product, ...]
    is_cuda: bool

    @cached_property
    def busy_s(self) -> float:
        """Time of all kernels."""
        return self.stats.kernel_time_us / 1e6

    @cached_property
    def num_launches(self) -> int:
        """Number of kernels."""
        return sum(kernel.calls for kernel in self.stats.kernels)

    @property
    def product_s(self) -> float:
        """Time of matrix products and convolutions, without the conversion of operands to FP8."""
        return self.time_of(lambda kernel: is_product(kernel.op) and not _converts(kernel))

    @property
    def fp8_s(self) -> float:
        """Time of FP8 products."""
        return self.time_of(lambda kernel: kernel.dtype == FP8 and not _converts(kernel))

    @property
    def convert_s(self) -> float:
        """Time of converting operands to FP8; 0 on a CPU, where it is part of the product."""
        return self.time_of(_converts)

    @property
    def cast_s(self) -> float:
        """Time of casts between floating dtypes."""
        return self.time_of(lambda kernel: kernel.is_cast)

    def time_of(self, wanted: Callable[[KernelRow], bool]) -> float:
        """Return the time of the kernels for which `wanted` is true."""
        return sum(kernel.time_us for kernel in self.stats.kernels if wanted(kernel)) / 1e6


def _converts(kernel: KernelRow) -> bool:
    """Return whether a kernel converts operands of an FP8 product."""
    return kernel.dtype == FP8 and kernel.on_tensor_cores is False


@dataclass(frozen=True)
class Measured(Observed):
    """A recorded and timed step of a setup."""

    timing: Timing
    """Consecutive steps without synchronisation between them."""
    host_s: float
    """Time of the host to queue a step; on a CPU the time of the step."""
    losses: tuple[float, ...]
    num_skipped: int
    """Steps that the loss scaler skipped."""
    last_scale: float

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return self.timing.median_s

    @property
    def idle_share(self) -> float:
        """Share of a step in which no kernel runs; 0 on a CPU."""
        return max(0.0, 1 - self.busy_s / self.step_s) if self.is_cuda else 0.0

    def predicted_s(self, busy_s: float, num_launches: int | None = None) -> float:
        """Predict the time of a step with other kernels.

        A step on a GPU takes the longer of its kernel time and its host time, which grows with the number of kernels.
        The ratio of the measured step to that maximum is assumed to stay the same. A CPU has only kernel time.

        Args:
            busy_s: Time of the kernels.
            num_launches: Number of kernels; None: as many as now.
        """
        if not self.is_cuda:
            return self.step_s * busy_s / self.busy_s if self.busy_s else self.step_s
        more = 1.0 if num_launches is None or not self.num_launches else num_launches / self.num_launches
        host_s = self.host_s * more
        return max(host_s, busy_s) * self.step_s / max(self.host_s, self.busy_s)


def observe(workload: Workload, setup: TrialSetup, device: torch.device) -> Observed:
    """Train a copy of a workload and record one step after the warm-up; random states are restored."""
    with _trained(workload, setup, device) as trial:
        for _ in range(WARMUP_STEPS):
            trial.step()
        return Observed(setup, *_record(trial), device.type == "cuda")


def measure(workload: Workload, setup: TrialSetup, device: torch.device, steps: int) -> Measured:
    """Train a copy of a workload for `steps` timed steps, then record one more; random states are restored.

    Args:
        workload: Unchanged.
        setup: How to train.
        device: Where to train.
        steps: Number of timed steps.
    """
    with _trained(workload, setup, device) as trial:
        outcomes: list[bool] = []
        scaler = trial.precision.scaler
        if scaler is not None:
            scaler.register_outcome_hook(outcomes.append)
        timing = time_on_device(trial.step, calls=steps, warmup_calls=WARMUP_STEPS, device=device)
        host_s = _host_time(trial, device) if device.type == "cuda" else timing.median_s
        stats, products = _record(trial)
        if scaler is not None:
            scaler.flush()
        return Measured(
            setup=setup,
            stats=stats,
            products=products,
            is_cuda=device.type == "cuda",
            timing=timing,
            host_s=host_s,
            losses=tuple(float(loss) for loss in trial.losses),
            num_skipped=outcomes.count(False),
            last_scale=1.0 if scaler is None else scaler.get_scale(),
        )


def time_again(workload: Workload, setup: TrialSetup, device: torch.device, steps: int) -> Timing:
    """Time more steps of a setup, to check that the machine is still as fast as before.

    The warm-up is that of `measure`: a cold start would look like a slower machine.
    """
    with _trained(workload, setup, device) as trial:
        return time_on_device(trial.step, calls=steps, warmup_calls=WARMUP_STEPS, device=device)


@contextmanager
def _trained(workload: Workload, setup: TrialSetup, device: torch.device) -> Iterator[Trial]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        trial = Trial(workload.copied(device), setup)
        yield trial
    del trial
    release_memory(device)


def _record(trial: Trial) -> tuple[OperatorStats, tuple[Product, ...]]:
    if trial.setup.is_captured:  # a replay runs no operators
        return OperatorStats(), ()
    # Other work disturbs the times of a CPU, so the fastest recording counts; kernels of a GPU are not disturbed.
    tries = [_record_once(trial) for _ in range(1 if torch.cuda.is_available() else CPU_RECORDINGS)]
    return min(tries, key=lambda one: one[0].kernel_time_us)


def _record_once(trial: Trial) -> tuple[OperatorStats, tuple[Product, ...]]:
    sink = ProductSink()
    with collect_operator_stats(False, kernels=True, leaks=True) as stats, listening(sink):
        trial.step()
    return stats, tuple(sink.products)


def _host_time(trial: Trial, device: torch.device) -> float:
    times_s = []
    for _ in range(HOST_CALLS):
        synchronize(device)
        begin = time.perf_counter()
        trial.step()
        times_s.append(time.perf_counter() - begin)
    synchronize(device)
    return statistics.median(times_s)


def copy_bandwidth(device: torch.device, num_bytes: int = _COPY_BYTES) -> float:
    """Return the bytes per second that a copy of `num_bytes` bytes reads and writes."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = time_on_device(lambda: target.copy_(source), calls=10, warmup_calls=3, device=device).median_s
    return 2 * num_bytes / seconds


def product_speedup(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed-up of a large half product over float32 with the present settings of torch."""

    def seconds(kind: torch.dtype) -> float:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=kind)
        out: Tensor = torch.empty_like(a)
        return time_on_device(lambda: torch.mm(a, a, out=out), calls=10, warmup_calls=3, device=device).median_s

    return seconds(torch.float32) / seconds(dtype)


def fp8_speedup(device: torch.device, dtype: torch.dtype) -> float:
    """Return the speed-up of a large FP8 product over half, without converting its operands."""
    with torch.random.fork_rng(devices=[device]):
        a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=dtype)
    operand = make_operand(a)

    def in_half() -> Tensor:
        return torch.mm(a, a.t())

    def in_fp8() -> Tensor:
        return multiply(operand.values, operand.inverse, operand.values, operand.inverse, dtype, fast=True)

    half_s, fp8_s = (
        time_on_device(call, calls=10, warmup_calls=3, device=device).median_s for call in (in_half, in_fp8)
    )
    return half_s / fp8_s


def fp8_rows(workload: Workload, setup: TrialSetup, device: torch.device) -> list[Fp8Row]:
    """Return the rounding of the operands of FP8 products in one step after the warm-up."""
    with _trained(workload, setup, device) as trial:
        for _ in range(WARMUP_STEPS):
            trial.step()
        with collect_fp8_numbers() as numbers:
            trial.step()
        return numbers.rows
