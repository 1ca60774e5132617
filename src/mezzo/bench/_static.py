"""Graph mode beside torch.compile with torch.autocast, in one run (`mezzo bench static`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from mezzo import static
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
from mezzo.bench._workloads import SEED, SimpleNet, simple_net_workload
from mezzo.devices import find_device
from mezzo.precision import Precision
from mezzo.record import Timing, synchronize
from mezzo.trial import Workload
from mezzo.vision.models import create_model

WARMUP_STEPS = 5
ROUNDS = 3
ROUND_S = 0.5
"""Shortest round of queued steps on a GPU: the first step of a round finds the device idle and is slower."""
REST_S = 2.0
"""Pause before each recipe: a GPU at its power limit is slower right after heavy work."""


@dataclass(frozen=True, slots=True)
class StaticRecipe:
    """One way to train."""

    by: str
    """stock or mezzo."""
    level: str
    """stock: float32 or autocast; mezzo: FP32, O1, O2, O2 guard."""
    compile_mode: str | None = None
    """stock: the mode of torch.compile; None: not compiled."""
    keeps_grads: bool = False
    """Gradients are set to zero between steps, not freed, as in old training loops."""
    channels_last: bool = False
    compact: bool = False
    """mezzo: compact masters."""

    @property
    def name(self) -> str:
        """The name in the table."""
        compiled = f", torch.compile {self.compile_mode}" if self.compile_mode else ""
        graph = " graph" if self.by == "mezzo" else ""
        switches = {
            "channels-last": self.channels_last,
            "compact masters": self.compact,
            "grads kept": self.keeps_grads,
        }
        return name_with_switches(f"{self.by} {self.level}{graph}{compiled}", switches)


STATIC_RECIPES: dict[str, tuple[StaticRecipe, ...]] = {
    "SimpleNet": (
        StaticRecipe("stock", "float32"),
        StaticRecipe("stock", "autocast"),
        *(StaticRecipe("stock", "autocast", mode) for mode in ("default", "reduce-overhead")),
        # with reduce-overhead torch refuses kept gradients: they lie in the memory of its graph
        StaticRecipe("stock", "autocast", "default", keeps_grads=True),
        *(StaticRecipe("mezzo", level) for level in ("FP32", "O1", "O2")),
        StaticRecipe("mezzo", "O2", compact=True),
        StaticRecipe("mezzo", "O2 guard"),
    ),
    "mobilenet_v3_small": (
        StaticRecipe("stock", "autocast"),
        StaticRecipe("stock", "autocast", channels_last=True),
        StaticRecipe("stock", "autocast", "reduce-overhead", channels_last=True),
        StaticRecipe("mezzo", "O2", channels_last=True),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticSettings:
    """What is measured."""

    device: str
    size: int
    batch_size: int
    image_size: int
    images: int
    steps: int
    models: tuple[str, ...]

    def __post_init__(self) -> None:
        refuse_below_one(self, "size", "batch_size", "image_size", "images", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticResult:
    """Time, memory and loss of one recipe."""

    model: str
    recipe: StaticRecipe
    samples: int
    """In a batch."""
    build_s: float
    """The first step: tracing, compiling, capturing."""
    timing: Timing
    """Steps whose loss the host reads, one by one."""
    queued_s: float
    """A step when the host waits only at the end of a round of steps; the median of three rounds."""
    loss: float
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBench(Bench[StaticSettings, StaticResult]):
    """All recipes of one run."""

    def speedup(self, result: StaticResult, *, queued: bool, keeps_grads: bool = False) -> float | None:
        """Return the speed-up over the fastest compiled stock recipe of the same model; None if there is none."""
        rivals = [
            _time_of(other, queued)
            for other in self.results
            if (other.model, other.recipe.by) == (result.model, "stock")
            and other.recipe.compile_mode is not None
            and other.recipe.keeps_grads == keeps_grads
        ]
        return min(rivals) / _time_of(result, queued) if rivals else None

    def cells(self, result: StaticResult) -> dict[str, str]:
        """Return one row of the table."""

        def ratios(keeps_grads: bool) -> str:
            both = (self.speedup(result, queued=queued, keeps_grads=keeps_grads) for queued in (False, True))
            return " / ".join(map(ratio, both))

        return {
            "model": result.model,
            "recipe": result.recipe.name,
            "step, loss read": milliseconds(result.timing.median_s),
            "spread": milliseconds(result.timing.spread_s),
            "step, queued": milliseconds(result.queued_s),
            "samples/s, queued": f"{result.samples / result.queued_s:.0f}",
            "x compiled stock, read / queued": ratios(False),
            "the same, grads kept": ratios(True),
            "first step": f"{result.build_s:.1f} s",
            "peak memory": gibibytes(result.peak_memory_bytes),
            "loss": f"{result.loss:.6f}",
        }

    def figures(self, result: StaticResult) -> dict[str, Any]:
        """Return the name and the speed-ups of a recipe."""
        speedups = {
            f"speedup_over_compiled_stock{'_grads_kept' * kept}{'_queued' * queued}": self.speedup(
                result, queued=queued, keeps_grads=kept
            )
            for kept in (False, True)
            for queued in (False, True)
        }
        return {"recipe": {**asdict(result.recipe), "name": result.recipe.name}, **speedups}


def _time_of(result: StaticResult, queued: bool) -> float:
    return result.queued_s if queued else result.timing.median_s


class _GuardedSimpleNet(SimpleNet):
    """All but the first layer inside `fp16_guard`, as in the guide's 3.2.3."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linears[0](x)
        for layer in self.linears[1:]:
            with static.amp.fp16_guard():
                x = layer(x)
        return x


def _make_workload(
    model: str, settings: StaticSettings, device: torch.device, recipe: StaticRecipe
) -> tuple[Workload, Optimizer]:
    """Return a model with its one batch, and its optimizer; the same numbers at every call."""
    if model == "SimpleNet":
        workload = simple_net_workload(settings.size, settings.batch_size, device)
        if recipe.level == "O2 guard":
            workload.model.__class__ = _GuardedSimpleNet
        return workload, SGD(workload.model.parameters(), lr=0.003)
    torch.manual_seed(SEED)
    network = create_model(model, num_classes=1000).to(device)
    images = torch.randn(settings.images, 3, settings.image_size, settings.image_size, device=device)
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (settings.images,), device=device)
    fused = {"fused": True} if recipe.by == "stock" and device.type == "cuda" else {}
    optimizer = SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, **fused)
    return Workload(network.train(), images, labels, cross_entropy), optimizer


def _make_step(
    recipe: StaticRecipe, workload: Workload, optimizer: Optimizer, device: torch.device
) -> Callable[[], Tensor]:
    if recipe.by == "stock":
        stock = StockPrecision(device.type, "float32" if recipe.level == "float32" else "float16")
        options: dict[str, Any] = {"keeps_grads": recipe.keeps_grads, "compile_mode": recipe.compile_mode}
        return TrainingLoop(workload, optimizer, stock, **options).step
    if recipe.level == "FP32":
        step = static.compile_step(workload.model, workload.loss_fn, optimizer)
    else:
        level = recipe.level.split()[0]
        is_guarded = recipe.level == "O2 guard"
        excluded = workload.model.linears[0] if is_guarded and isinstance(workload.model, SimpleNet) else None
        masters: Any = "compact" if recipe.compact else True
        precision = Precision(level, master_weight=masters, excluded_layers=excluded)
        precision.prepare(workload.model, optimizer)
        step = precision.compile(workload.model, workload.loss_fn, optimizer, use_fp16_guard=is_guarded)
    return lambda: step(workload.inputs, workload.targets)


def bench_static(
    *,
    size: int | None = None,
    batch_size: int | None = None,
    image_size: int = 224,
    images: int = 256,
    steps: int = 20,
    models: tuple[str, ...] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> StaticBench:
    """Train with every recipe, in graph mode and with torch.compile; return times, memory and losses.

    Args:
        size: Width of SimpleNet; None: 8192 on a GPU, 256 on a CPU.
        batch_size: Of SimpleNet; None: 2048 on a GPU, 64 on a CPU.
        image_size: Height and width of MobileNet's images.
        images: Images in MobileNet's batch.
        steps: Timed steps of each recipe.
        models: Some of SimpleNet, mobilenet_v3_small; None: both on a GPU, SimpleNet on a CPU.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        progress: Called after every step.
    """
    place = find_device(device)
    settings = StaticSettings(
        device=str(place),
        **simple_net_sizes(place, size, batch_size),
        image_size=image_size,
        images=images,
        steps=steps,
        models=choose("--model", models if models or place.type == "cuda" else ("SimpleNet",), tuple(STATIC_RECIPES)),
    )

    def measure(variant: tuple[str, StaticRecipe]) -> StaticResult:
        total = 1 + WARMUP_STEPS + settings.steps + ROUNDS
        try:
            return _measure(
                *variant, settings, place, Meter(f"{variant[0]}, {variant[1].name}", total, place, progress)
            )
        finally:
            torch.compiler.reset()

    variants = [(model, recipe) for model in settings.models for recipe in STATIC_RECIPES[model]]
    benchmark_before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        results = measure_each(variants, measure, place)
    finally:
        torch.backends.cudnn.benchmark = benchmark_before
    return StaticBench(settings=settings, results=results, machine=read_machine(place))


def _measure(
    model: str, recipe: StaticRecipe, settings: StaticSettings, device: torch.device, meter: Meter
) -> StaticResult:
    workload, optimizer = _make_workload(model, settings, device, recipe)
    step = _make_step(recipe, workload, optimizer, device)

    def read_loss() -> float:
        return step().item()

    start = time.perf_counter()
    read_loss()
    build_s = time.perf_counter() - start
    meter.advance()
    meter.reset_peak()
    if device.type == "cuda":
        time.sleep(REST_S)
    meter.warm_up(read_loss, WARMUP_STEPS)
    timing = meter.time(read_loss, settings.steps)
    queued = []
    steps = max(settings.steps, round(ROUND_S / timing.median_s)) if device.type == "cuda" else settings.steps
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        synchronize(device)
        queued.append((time.perf_counter() - start) / steps)
        meter.advance()
    return StaticResult(
        model=model,
        recipe=recipe,
        samples=settings.batch_size if model == "SimpleNet" else settings.images,
        build_s=build_s,
        timing=timing,
        queued_s=statistics.median(queued),
        loss=loss.item(),
        peak_memory_bytes=meter.peak_memory_bytes(),
    )
