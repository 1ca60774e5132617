"""Trains a network by one recipe and measures it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo import static
from mezzo.bench._frame import Meter, Progress
from mezzo.bench._networks import Batch, Network, find_network
from mezzo.bench._profile import profile_steps
from mezzo.bench._static_recipes import BF16_WEIGHTS, StaticRecipe
from mezzo.bench._static_result import StaticResult, StaticSettings
from mezzo.bench._training import StockPrecision, TrainingLoop
from mezzo.bench._workloads import SimpleNet
from mezzo.devices import find_device
from mezzo.kernels import torch_operators_only
from mezzo.precision import Precision
from mezzo.record import synchronize
from mezzo.static import CompiledStep
from mezzo.trial import Workload

WARMUP_STEPS = 5
ROUNDS = 3
ROUND_S = 0.5
"""Shortest round of queued steps on a GPU: the first step of a round finds the device idle and is slower."""
REST_S = 2.0
"""Pause before each recipe: a GPU at its power limit is slower right after heavy work."""


_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Read when Inductor is first imported."""

_FP8_RECIPES: dict[str, dict[str, str]] = {
    "": {},
    "delayed": {"scaling": "delayed"},
    "row": {"granularity": "row"},
}


class _GuardedSimpleNet(SimpleNet):
    """All but the first layer inside `fp16_guard`, as in the guide's 3.2.3."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linears[0](x)
        for layer in self.linears[1:]:
            with static.amp.fp16_guard():
                x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class _Training:
    """A network that is ready to train by a recipe."""

    step: Callable[[Batch], Tensor]
    """Trains one step; returns the loss, on the device."""
    batches: list[Batch]
    precision: Precision | StockPrecision | None
    """None: float32 without any."""
    captured: CompiledStep | None = None
    """The step of graph mode."""

    @property
    def form(self) -> str:
        """How the step of graph mode runs; empty for other recipes."""
        return "" if self.captured is None else self.captured.report().chosen

    @property
    def scale(self) -> float | None:
        """The loss scale; None without scaling. Waits for the device."""
        if isinstance(self.precision, Precision):
            return None if self.precision.scaler is None else self.precision.scaler.get_scale()
        return None if self.precision is None else self.precision.scale

    def check(self, steps: int, advance: Callable[[], object]) -> tuple[float, int]:
        """Train steps over all batches; return the mean loss of the last pass and the number of skipped steps."""
        losses, drops, scale = [], 0, self.scale
        for number in range(steps):
            losses.append(self.step(self.batches[number % len(self.batches)]).item())
            before, scale = scale, self.scale
            drops += before is not None and scale is not None and scale < before
            advance()
        if isinstance(self.precision, Precision) and self.precision.scaler is not None:
            self.precision.scaler.flush()
            drops = self.precision.scaler.skipped_steps
        return statistics.fmean(losses[-len(self.batches) :]), drops


def _prepare(network: Network, recipe: StaticRecipe, settings: StaticSettings, device: torch.device) -> _Training:
    model, loss_fn, batches = network.make(device)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [(inputs.to(memory_format=torch.channels_last), targets) for inputs, targets in batches]
    if recipe.level == "O2 guard":
        model.__class__ = _GuardedSimpleNet
    if recipe.level == BF16_WEIGHTS:
        model.to(torch.bfloat16)
    if recipe.by == "torchao":
        _use_torchao(model)
    fused = {"fused": True} if recipe.by != "mezzo" and device.type == "cuda" else {}
    optimizer = network.make_optimizer(model, **fused)
    if recipe.by == "mezzo" and settings.fuse and network.fuse_loss is not None:
        loss_fn = network.fuse_loss(model)
    workload = Workload(model, *batches[0], _in_float32(loss_fn) if recipe.level == BF16_WEIGHTS else loss_fn)
    dtype = settings.dtype or network.dtype
    if recipe.by != "mezzo":
        return _stock(recipe, workload, optimizer, batches, device, dtype)
    if recipe.level == "FP32":
        captured = static.compile_step(model, loss_fn, optimizer)
        return _Training(lambda batch: captured(*batch), batches, None, captured)
    # While other recipes are built beside it, a measurement of both forms of a step would mislead.
    backend = "inductor" if settings.at_once else "auto"
    return _mezzo(recipe, workload, optimizer, batches, dtype, {"fuse": True} if settings.fuse else {}, backend)


def _use_torchao(model: nn.Module) -> None:
    """Let torchao compute the linear layers in FP8, the head apart, as its documentation advises."""
    from torchao.float8 import convert_to_float8_training

    def is_wanted(layer: nn.Module, name: str) -> bool:
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (1,)
        return "head" not in name and all(size % 16 == 0 for size in sizes)

    convert_to_float8_training(model, module_filter_fn=is_wanted)


def _in_float32(loss_fn: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return the loss of float32 logits: without autocast it would be computed in half."""
    return lambda logits, targets: loss_fn(logits.float(), targets)


def _stock(
    recipe: StaticRecipe,
    workload: Workload,
    optimizer: Optimizer,
    batches: list[Batch],
    device: torch.device,
    dtype: str,
) -> _Training:
    uses_autocast = recipe.level not in ("float32", BF16_WEIGHTS)
    precision = StockPrecision(device.type, dtype if uses_autocast else "float32")
    loop = TrainingLoop(
        workload,
        optimizer,
        precision,
        keeps_grads=recipe.keeps_grads,
        compile_mode=recipe.compile_mode,
        compiles_loss=recipe.compiles_loss,
    )
    return _Training(loop.step, batches, precision)


def _mezzo(
    recipe: StaticRecipe,
    workload: Workload,
    optimizer: Optimizer,
    batches: list[Batch],
    dtype: str,
    options: dict[str, Any],
    backend: str,
) -> _Training:
    model, is_guarded = workload.model, recipe.level == "O2 guard"
    excluded = model.linears[0] if is_guarded and isinstance(model, SimpleNet) else None
    masters: Any = "compact" if recipe.compact else True
    precision = Precision(
        recipe.level.split()[0],
        dtype,
        master_weight=masters,
        optimizer_state="bfloat16" if recipe.half_state else None,
        excluded_layers=excluded,
        fp8=_FP8_RECIPES[recipe.fp8] if recipe.level == "O3" else None,
    )
    precision.prepare(model, optimizer, **options)
    if recipe.is_eager:
        return _Training(TrainingLoop(workload, optimizer, precision).step, batches, precision)
    captured = precision.compile(
        model,
        workload.loss_fn,
        optimizer,
        use_fp16_guard=is_guarded,
        backend=backend,
        saves_memory=recipe.saves_memory,
    )
    return _Training(lambda batch: captured(*batch), batches, precision, captured)


@contextmanager
def _conditions(recipe: StaticRecipe) -> Iterator[None]:
    """Inside, cuDNN searches the fastest kernels, and the stock side uses torch's own operators."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch_operators_only() if recipe.by != "mezzo" else nullcontext():
            yield
    finally:
        torch.backends.cudnn.benchmark = before
        torch.compiler.reset()


def build_recipe(
    model: str, recipe: StaticRecipe, settings: StaticSettings, threads: int, progress: Progress | None = None
) -> float:
    """Train only the first step; return its seconds. It fills the caches of the compilers on disk.

    Args:
        model: The name of the network.
        recipe: How to train.
        settings: Sizes and device.
        threads: Processes in which Inductor may compile; many recipes are built at the same time.
        progress: Not called: the result is the first report.
    """
    os.environ.setdefault(_COMPILE_THREADS, str(threads))
    place = find_device(settings.device)
    with _conditions(recipe):
        training = _prepare(find_network(model, settings.sizes), recipe, settings, place)
        start = time.perf_counter()
        training.step(training.batches[0]).item()
        return time.perf_counter() - start


def measure_recipe(
    model: str, recipe: StaticRecipe, settings: StaticSettings, progress: Progress | None = None
) -> StaticResult:
    """Return time, memory and loss of a recipe; the first call of `progress` comes after the first step."""
    place = find_device(settings.device)
    total = settings.check_steps + WARMUP_STEPS + settings.steps + ROUNDS
    meter = Meter(f"{model}, {recipe.name}", total, place, progress)
    with _conditions(recipe):
        return _measure(find_network(model, settings.sizes), recipe, settings, place, meter)


def measure_recipe_beside(
    model: str, recipe: StaticRecipe, settings: StaticSettings, threads: int, progress: Progress | None = None
) -> StaticResult:
    """Return what `measure_recipe` returns; Inductor may compile in `threads` processes."""
    os.environ.setdefault(_COMPILE_THREADS, str(threads))
    return measure_recipe(model, recipe, settings, progress)


def _measure(
    network: Network, recipe: StaticRecipe, settings: StaticSettings, device: torch.device, meter: Meter
) -> StaticResult:
    training = _prepare(network, recipe, settings, device)
    times = [time.perf_counter()]

    def advance() -> None:
        times.append(time.perf_counter())
        meter.advance()

    loss, skipped = training.check(settings.check_steps, advance)
    scale = training.scale

    def read_loss() -> float:
        return training.step(training.batches[0]).item()

    meter.reset_peak()
    if device.type == "cuda":
        time.sleep(REST_S)
    meter.warm_up(read_loss, WARMUP_STEPS)
    timing = meter.time(read_loss, settings.steps)
    steps = max(settings.steps, round(ROUND_S / timing.median_s)) if device.type == "cuda" else settings.steps
    queued = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            training.step(training.batches[0])
        synchronize(device)
        queued.append((time.perf_counter() - start) / steps)
        meter.advance()
    peak = meter.peak_memory_bytes()
    kernels = profile_steps(lambda: training.step(training.batches[0])) if settings.kernels else ()
    is_half = recipe.level not in ("float32", "FP32")
    return StaticResult(
        model=network.name,
        recipe=recipe,
        dtype=(settings.dtype or network.dtype) if is_half else "float32",
        shape=network.shape,
        samples=network.units,
        unit=network.unit,
        flops=None if network.flops is None else network.flops * network.units,
        build_s=times[1] - times[0],
        timing=timing,
        queued_s=statistics.median(queued),
        loss=loss,
        scale=scale,
        skipped=skipped,
        form=training.form,
        peak_memory_bytes=peak,
        kernels=kernels,
    )
