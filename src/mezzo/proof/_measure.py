"""What a training step costs: its time, the host's part, its kernels, and what else a recording tells of it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo._timer import Timing, release_memory, synchronize, time_on_device
from mezzo.amp._recorder import listening
from mezzo.amp.debugging import KernelRow, OperatorStats, collect_operator_stats
from mezzo.proof._products import Product, ProductSink, is_product
from mezzo.proof._trial import Setup, Task, Trainer

WARMUP_STEPS = 3
HOST_CALLS = 5
_TINY_KERNELS = 256
_COPY_BYTES = 2**28
_PRODUCT_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of one setup."""

    setup: Setup
    timing: Timing
    """Steps one after the other, nobody waiting in between."""
    host_s: float
    """Until the host has queued a step; on a CPU the step itself."""
    stats: OperatorStats
    """Of one recorded step, with its kernels and leaks; empty for a captured step."""
    products: tuple[Product, ...]
    losses: tuple[float, ...]
    num_skipped: int
    """Steps that the loss scaler skipped."""
    last_scale: float
    is_cuda: bool

    @property
    def step_s(self) -> float:
        """Median time of a step."""
        return self.timing.median_s

    @property
    def busy_s(self) -> float:
        """Time of all kernels of a step."""
        return self.stats.kernel_time_us / 1e6

    @property
    def num_launches(self) -> int:
        """Kernels of a step."""
        return sum(kernel.calls for kernel in self.stats.kernels)

    @property
    def idle_share(self) -> float:
        """Share of a step in which no kernel runs; 0 on a CPU."""
        return max(0.0, 1 - self.busy_s / self.step_s) if self.is_cuda else 0.0

    @property
    def product_s(self) -> float:
        """Time of matrix products and convolutions."""
        return self.time_of(lambda kernel: is_product(kernel.op))

    @property
    def cast_s(self) -> float:
        """Time of casts between floating dtypes."""
        return self.time_of(lambda kernel: kernel.is_cast)

    def time_of(self, wanted: Callable[[KernelRow], bool]) -> float:
        """Return the time of the kernels that a function picks."""
        return sum(kernel.time_us for kernel in self.stats.kernels if wanted(kernel)) / 1e6

    def predicted_s(self, busy_s: float) -> float:
        """Return the time of a step whose kernels take `busy_s`, the host's part unchanged.

        A GPU's step takes as long as the longer of the two; what it takes more than that now, it takes more then.
        """
        if not self.is_cuda:
            return self.step_s * busy_s / self.busy_s if self.busy_s else self.step_s
        return max(self.host_s, busy_s) * self.step_s / max(self.host_s, self.busy_s)


def measure(task: Task, setup: Setup, device: torch.device, steps: int) -> Measured:
    """Train a copy of a task for some steps, timed, then one step recorded; random numbers are given back.

    Args:
        task: Left as it is.
        setup: How it is trained.
        device: Where.
        steps: Timed ones.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        trainer = Trainer(task.copied(device), setup)
        outcomes: list[bool] = []
        trainer.scaler.register_outcome_hook(outcomes.append)
        timing = time_on_device(trainer.step, calls=steps, warmup_calls=WARMUP_STEPS, device=device)
        host_s = _host_time(trainer, device) if device.type == "cuda" else timing.median_s
        stats, products = OperatorStats(), ProductSink()
        if not setup.is_captured:
            with collect_operator_stats(False, kernels=True, leaks=True) as stats, listening(products):
                trainer.step()
        trainer.scaler.flush()
        measured = Measured(
            setup=setup,
            timing=timing,
            host_s=host_s,
            stats=stats,
            products=tuple(products.products),
            losses=tuple(float(loss) for loss in trainer.losses),
            num_skipped=outcomes.count(False),
            last_scale=trainer.scaler.get_scale() if trainer.scaler.is_enable() else 1.0,
            is_cuda=device.type == "cuda",
        )
    del trainer
    release_memory(device)
    return measured


def _host_time(trainer: Trainer, device: torch.device) -> float:
    times_s = []
    for _ in range(HOST_CALLS):
        synchronize(device)
        begin = time.perf_counter()
        trainer.step()
        times_s.append(time.perf_counter() - begin)
    synchronize(device)
    return statistics.median(times_s)


def launch_gap_s(device: torch.device) -> float:
    """Return what a CUDA graph needs from one kernel to the next, besides the kernels: measured on tiny ones."""
    x = torch.zeros(1, device=device)

    def tiny() -> None:
        for _ in range(_TINY_KERNELS):
            x.add_(1)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        tiny()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiny()
    replay_s = time_on_device(graph.replay, calls=10, warmup_calls=3, device=device).median_s
    with collect_operator_stats(False, kernels=True) as stats:
        tiny()
    return max(0.0, replay_s - stats.kernel_time_us / 1e6) / _TINY_KERNELS


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written a second by a large copy."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = time_on_device(lambda: target.copy_(source), calls=10, warmup_calls=3, device=device).median_s
    return 2 * _COPY_BYTES / seconds


def product_speedup(device: torch.device, dtype: torch.dtype) -> float:
    """Return how many times as fast as float32, as torch is set up now, a large product is in half."""

    def seconds(kind: torch.dtype) -> float:
        a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=kind)
        out: Tensor = torch.empty_like(a)
        return time_on_device(lambda: torch.mm(a, a, out=out), calls=10, warmup_calls=3, device=device).median_s

    return seconds(torch.float32) / seconds(dtype)
