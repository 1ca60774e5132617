"""The training step of stock torch beside mezzo's, every recipe in one run (`mezzo bench step`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from mezzo.bench._frame import (
    Bench,
    Meter,
    Progress,
    choose,
    gibibytes,
    measure_each,
    milliseconds,
    name_with_switches,
    ratio,
    refuse_below_one,
    simple_net_sizes,
)
from mezzo.bench._machine import read_machine
from mezzo.bench._training import StockPrecision, TrainingLoop
from mezzo.bench._workloads import simple_net_workload, small_net_workload
from mezzo.devices import find_device
from mezzo.precision import Precision
from mezzo.proof import copy_bandwidth
from mezzo.record import Timing, operator_log, time_on_device
from mezzo.trial import Workload

WARMUP_STEPS = 3
MAX_NORM = 0.5


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer, and the fewest bytes per parameter that its update moves with half gradients and float32 masters."""

    name: str
    make: Callable[..., Optimizer]
    update_bytes: int


OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind("SGD", lambda params, **more: SGD(params, lr=0.003, **more), 12),
        OptimizerKind("SGD momentum", lambda params, **more: SGD(params, lr=0.0003, momentum=0.9, **more), 20),
        OptimizerKind("AdamW", lambda params, **more: AdamW(params, lr=1e-5, **more), 28),
    )
}


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """One way to train."""

    by: str
    """stock or mezzo."""
    level: str
    """float32 or TF32; for stock also 'foreach' or 'fused' (the optimizer's implementation); for mezzo O1 or O2."""
    dtype: str
    clips: bool = False
    keeps_grads: bool = False
    """Gradients are set to zero between steps, not freed (`zero_grad(set_to_none=False)`), as in old training loops."""
    compact: bool = False
    """mezzo: compact masters."""

    @property
    def name(self) -> str:
        """The name in the table."""
        what = self.level if self.dtype == "float32" else f"{self.dtype} {self.level}"
        switches = {"compact masters": self.compact, "clipped": self.clips, "grads kept": self.keeps_grads}
        return name_with_switches(f"{self.by} {what}", switches)


def _recipes(optimizer: str) -> Iterator[StepRecipe]:
    """Yield the recipes of an optimizer; only AdamW is also measured with clipping, where it is common."""
    for clips in (False, True) if optimizer == "AdamW" else (False,):
        yield StepRecipe("stock", "float32", "float32", clips)
        if optimizer == "SGD":
            yield StepRecipe("stock", "TF32", "float32")
        for dtype in ("float16", "bfloat16"):
            for by, levels in (("stock", ("foreach", "fused")), ("mezzo", ("O1", "O2"))):
                for level in levels:
                    yield StepRecipe(by, level, dtype, clips)
                    if by == "stock" and dtype == "float16":
                        yield StepRecipe(by, level, dtype, clips, keeps_grads=True)
                    if level == "O2":
                        yield StepRecipe(by, level, dtype, clips, compact=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What is measured."""

    device: str
    size: int
    batch_size: int
    steps: int
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    warmup_steps: int = WARMUP_STEPS

    def __post_init__(self) -> None:
        refuse_below_one(self, "size", "batch_size", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """Time, memory and loss of one recipe."""

    model: str
    optimizer: str
    recipe: StepRecipe
    timing: Timing
    """Whole steps: forward, backward, clipping, step, update of the scale, reading the loss on the host."""
    update_s: float
    """Only `optimizer.step()`, on the device."""
    update_bytes: int
    """The fewest bytes that an update with half gradients and float32 masters must move."""
    loss: float
    """Of the last step."""
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBench(Bench[StepSettings, StepMeasurement]):
    """All recipes of one run."""

    copy_bytes_per_s: float
    """Bandwidth of a large copy on the same device, bytes read plus bytes written."""

    def speedup(self, result: StepMeasurement, *, keeps_grads: bool = False) -> float | None:
        """Return the speed-up over the fastest stock recipe of the same model, optimizer, dtype and clipping.

        None if there is no such recipe.
        """
        rivals = [
            other.timing.median_s
            for other in self.results
            if (other.model, other.optimizer, other.recipe.by) == (result.model, result.optimizer, "stock")
            and (other.recipe.dtype, other.recipe.clips) == (result.recipe.dtype, result.recipe.clips)
            and other.recipe.keeps_grads == keeps_grads
        ]
        return min(rivals) / result.timing.median_s if rivals else None

    def float32(self, result: StepMeasurement) -> StepMeasurement:
        """Return the float32 run (without TF32) of the same model, optimizer and clipping."""
        return next(
            other
            for other in self.results
            if (other.model, other.optimizer, other.recipe.clips)
            == (result.model, result.optimizer, result.recipe.clips)
            and other.recipe.level == "float32"
        )

    def share_of_copy(self, result: StepMeasurement) -> float:
        """Return the bandwidth of the update, on the bytes it must move, as a share of the copy's bandwidth."""
        return result.update_bytes / result.update_s / self.copy_bytes_per_s

    def cells(self, result: StepMeasurement) -> dict[str, str]:
        """Return one row of the table."""
        float32 = self.float32(result)
        return {
            "model": result.model,
            "optimizer": result.optimizer,
            "recipe": result.recipe.name,
            "step": milliseconds(result.timing.median_s),
            "spread": milliseconds(result.timing.spread_s),
            "x stock": ratio(self.speedup(result)),
            "x stock, grads kept": ratio(self.speedup(result, keeps_grads=True)),
            "x float32": ratio(float32.timing.median_s / result.timing.median_s),
            "update": milliseconds(result.update_s),
            "of copy": f"{self.share_of_copy(result):.0%}" if result.recipe.by == "mezzo" else "-",
            "peak memory": gibibytes(result.peak_memory_bytes),
            "loss": f"{result.loss:.6f}",
            "loss / float32 - 1": f"{result.loss / float32.loss - 1:+.1e}",
        }

    def figures(self, result: StepMeasurement) -> dict[str, Any]:
        """Return the computed figures of a recipe."""
        float32 = self.float32(result)
        return {
            "speedup_over_best_stock": self.speedup(result),
            "speedup_over_best_stock_grads_kept": self.speedup(result, keeps_grads=True),
            "speedup_over_float32": float32.timing.median_s / result.timing.median_s,
            "share_of_copy_bandwidth": self.share_of_copy(result),
            "relative_loss": result.loss / float32.loss - 1,
        }


def make_training(recipe: StepRecipe, workload: Workload, optimizer: str) -> TrainingLoop:
    """Return a workload prepared for a recipe and an optimizer, by the optimizer's name."""
    kind, model = OPTIMIZERS[optimizer], workload.model.train()
    precision: Precision | StockPrecision
    if recipe.by == "mezzo":
        made = kind.make(model.parameters())
        masters: Any = "compact" if recipe.compact else True
        precision = Precision(recipe.level, recipe.dtype, master_weight=masters)
        precision.prepare(model, made)
    else:
        made = kind.make(model.parameters(), **({"fused": True} if recipe.level == "fused" else {"foreach": True}))
        precision = StockPrecision(next(model.parameters()).device.type, recipe.dtype)
    max_norm = MAX_NORM if recipe.clips else None
    return TrainingLoop(workload, made, precision, max_norm=max_norm, keeps_grads=recipe.keeps_grads)


@operator_log.paused()
def bench_step(
    *,
    size: int | None = None,
    batch_size: int | None = None,
    steps: int = 20,
    models: tuple[str, ...] | None = None,
    optimizers: tuple[str, ...] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> StepBench:
    """Train SimpleNet and SmallNet (142 small tensors) with every recipe; return times, memory and losses.

    Args:
        size: Width of SimpleNet; None: 8192 on a GPU, 256 on a CPU.
        batch_size: Of SimpleNet; None: 2048 on a GPU, 64 on a CPU.
        steps: Timed steps of each recipe; three warm-up steps come before them and train too.
        models: Some of SimpleNet, SmallNet; None: both.
        optimizers: Some of SGD, SGD momentum, AdamW; None: all.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        progress: Called after every step.
    """
    place = find_device(device)
    makers: dict[str, Callable[[], Workload]] = {
        "SimpleNet": lambda: simple_net_workload(settings.size, settings.batch_size, place),
        "SmallNet": lambda: small_net_workload(place),
    }
    settings = StepSettings(
        device=str(place),
        **simple_net_sizes(place, size, batch_size),
        steps=steps,
        models=choose("--model", models, tuple(makers)),
        optimizers=choose("--optimizer", optimizers, tuple(OPTIMIZERS)),
    )
    variants = [
        (model, kind, recipe)
        for model in settings.models
        for kind in OPTIMIZERS.values()
        if kind.name in settings.optimizers
        for recipe in _recipes(kind.name)
    ]

    def measure(variant: tuple[str, OptimizerKind, StepRecipe]) -> StepMeasurement:
        model, kind, recipe = variant
        total = settings.warmup_steps + settings.steps
        meter = Meter(f"{model}, {kind.name}, {recipe.name}", total, place, progress)
        return _measure(model, makers[model](), kind, recipe, settings, place, meter)

    copy_bytes_per_s = copy_bandwidth(
        place, 2**31 if place.type == "cuda" else 2**26
    )  # first: after a minute of training the GPU is about 10 % slower
    results = measure_each(variants, measure, place)
    return StepBench(settings=settings, results=results, copy_bytes_per_s=copy_bytes_per_s, machine=read_machine(place))


def _measure(
    model: str,
    workload: Workload,
    kind: OptimizerKind,
    recipe: StepRecipe,
    settings: StepSettings,
    device: torch.device,
    meter: Meter,
) -> StepMeasurement:
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = recipe.level == "TF32"
    losses: list[float] = []
    try:
        training = make_training(recipe, workload, kind.name)

        def step() -> None:
            losses.append(training.step().item())

        meter.warm_up(step, settings.warmup_steps)
        meter.reset_peak()
        timing = meter.time(step, settings.steps)
        peak = meter.peak_memory_bytes()
        training.optimizer.zero_grad(set_to_none=True)
        training.forward().backward()
        update = time_on_device(training.optimizer.step, calls=10, warmup_calls=2, device=device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32_before
    parameters = sum(p.numel() for p in workload.model.parameters())
    return StepMeasurement(
        model=model,
        optimizer=kind.name,
        recipe=recipe,
        timing=timing,
        update_s=update.median_s,
        update_bytes=parameters * (kind.update_bytes - 2 * recipe.compact),
        loss=losses[-1],
        peak_memory_bytes=peak,
    )
