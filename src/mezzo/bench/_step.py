"""The training step of stock torch beside ours, every recipe in one run (`mezzo bench step`)."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mezzo import amp
from mezzo._timer import Timing, release_memory, time_calls, time_on_device
from mezzo.amp.debugging import operator_log
from mezzo.bench._clocks import Machine, read_machine
from mezzo.bench._device import find_device
from mezzo.bench._settings import chosen, ratio, refuse_below_one
from mezzo.bench._task import SEED, simple_net_task
from mezzo.proof import Task

WARMUP_STEPS = 3
SMALL_LAYERS, SMALL_SIZE, SMALL_BATCH = 71, 64, 64  # 142 tensors, as many as MobileNetV3-small has
MAX_NORM = 0.5

Progress = Callable[[str, int, int], None]
"""Told the recipe, the steps done in it and the steps it has."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """An optimizer, and the fewest bytes a parameter its update can move on half gradients and float32 masters."""

    name: str
    make: Callable[..., Optimizer]
    update_bytes: int


_OPTIMIZERS = (
    OptimizerKind("SGD", lambda params, **more: SGD(params, lr=0.003, **more), 12),
    OptimizerKind("SGD momentum", lambda params, **more: SGD(params, lr=0.0003, momentum=0.9, **more), 20),
    OptimizerKind("AdamW", lambda params, **more: AdamW(params, lr=1e-5, **more), 28),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to train: by whom, at which level, in which dtype."""

    by: str
    """stock or mezzo."""
    level: str
    """float32 or TF32; for stock 'foreach' or 'fused', how the optimizer is told to step; for mezzo O1 or O2."""
    dtype: str
    clips: bool = False
    keeps_grads: bool = False
    """Gradients are set to zero between steps, not freed (`zero_grad(set_to_none=False)`): what old loops still do."""
    compact: bool = False
    """mezzo: masters are compact."""

    @property
    def name(self) -> str:
        """A line for people."""
        what = self.level if self.dtype == "float32" else f"{self.dtype} {self.level}"
        switches = {"compact masters": self.compact, "clipped": self.clips, "grads kept": self.keeps_grads}
        return ", ".join([f"{self.by} {what}", *(switch for switch, is_on in switches.items() if is_on)])


def _recipes(kind: OptimizerKind) -> Iterator[Recipe]:
    """Yield what is measured with an optimizer; clipping with AdamW alone, where everybody does it."""
    for clips in (False, True) if kind.name == "AdamW" else (False,):
        yield Recipe("stock", "float32", "float32", clips)
        if kind.name == "SGD":
            yield Recipe("stock", "TF32", "float32")
        for dtype in ("float16", "bfloat16"):
            for by, levels in (("stock", ("foreach", "fused")), ("mezzo", ("O1", "O2"))):
                for level in levels:
                    yield Recipe(by, level, dtype, clips)
                    if by == "stock" and dtype == "float16":
                        yield Recipe(by, level, dtype, clips, keeps_grads=True)
                    if level == "O2":
                        yield Recipe(by, level, dtype, clips, compact=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
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
class StepResult:
    """What one recipe took and reached."""

    model: str
    optimizer: str
    recipe: Recipe
    timing: Timing
    """Whole steps: forward, backward, clipping, step, scale, the loss read by the host."""
    update_s: float
    """`optimizer.step()` alone, on the device."""
    update_bytes: int
    """The fewest that an update with half gradients and float32 masters must move."""
    loss: float
    """At the last step."""
    peak_memory_bytes: int | None

    @property
    def name(self) -> str:
        """A line for people."""
        return f"{self.model}, {self.optimizer}, {self.recipe.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBench:
    """All recipes of one run."""

    settings: Settings
    results: tuple[StepResult, ...]
    copy_bytes_per_s: float
    """What a large copy on the same device reaches, bytes read plus bytes written."""
    machine: Machine

    def best_stock(self, result: StepResult, *, keeps_grads: bool = False) -> StepResult | None:
        """Return the fastest stock recipe of the same model, optimizer, dtype and clipping; None if there is none."""
        rivals = [
            other
            for other in self.results
            if (other.model, other.optimizer, other.recipe.by) == (result.model, result.optimizer, "stock")
            and (other.recipe.dtype, other.recipe.clips) == (result.recipe.dtype, result.recipe.clips)
            and other.recipe.keeps_grads == keeps_grads
        ]
        return min(rivals, key=lambda other: other.timing.median_s, default=None)

    def speedup(self, result: StepResult, *, keeps_grads: bool = False) -> float | None:
        """Return how many times as fast as the best stock recipe a recipe is; None if there is nothing to compare."""
        stock = self.best_stock(result, keeps_grads=keeps_grads)
        return None if stock is None else stock.timing.median_s / result.timing.median_s

    def float32(self, result: StepResult) -> StepResult:
        """Return the float32 run (without TF32) of the same model, optimizer and clipping."""
        return next(
            other
            for other in self.results
            if (other.model, other.optimizer, other.recipe.clips)
            == (result.model, result.optimizer, result.recipe.clips)
            and other.recipe.level == "float32"
        )

    def share_of_copy(self, result: StepResult) -> float:
        """Return the bandwidth of the update on the bytes it must move, as a share of the copy's."""
        return result.update_bytes / result.update_s / self.copy_bytes_per_s

    def table(self) -> list[list[str]]:
        """Return one row a recipe, header first."""
        header = ["model", "optimizer", "recipe", "step", "spread", "x stock", "x stock, grads kept", "x float32"]
        header += ["update", "of copy", "peak memory", "loss", "loss / float32 - 1"]
        rows = [header]
        for result in self.results:
            median_s, float32 = result.timing.median_s, self.float32(result)
            memory = result.peak_memory_bytes
            rows.append(
                [
                    result.model,
                    result.optimizer,
                    result.recipe.name,
                    f"{median_s * 1e3:.3f} ms",
                    f"{result.timing.spread_s * 1e3:.3f} ms",
                    ratio(self.speedup(result)),
                    ratio(self.speedup(result, keeps_grads=True)),
                    f"{float32.timing.median_s / median_s:.2f}",
                    f"{result.update_s * 1e3:.3f} ms",
                    f"{self.share_of_copy(result):.0%}" if result.recipe.by == "mezzo" else "-",
                    "-" if memory is None else f"{memory / 2**30:.2f} GiB",
                    f"{result.loss:.6f}",
                    f"{result.loss / float32.loss - 1:+.1e}",
                ]
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data, times in seconds and memory in bytes."""
        results = [
            {
                **asdict(result),
                "timing": {"median_s": result.timing.median_s, "spread_s": result.timing.spread_s},
                "speedup_over_best_stock": self.speedup(result),
                "speedup_over_best_stock_grads_kept": self.speedup(result, keeps_grads=True),
                "speedup_over_float32": self.float32(result).timing.median_s / result.timing.median_s,
                "share_of_copy_bandwidth": self.share_of_copy(result),
                "relative_loss": result.loss / self.float32(result).loss - 1,
            }
            for result in self.results
        ]
        return {
            "settings": asdict(self.settings),
            "copy_bytes_per_s": self.copy_bytes_per_s,
            "results": results,
            "machine": asdict(self.machine),
        }


class _Training:
    """A task trained by a recipe."""

    def __init__(self, recipe: Recipe, task: Task, kind: OptimizerKind) -> None:
        self.recipe, self.task, self.model = recipe, task, task.model.train()
        scales = recipe.dtype == "float16"
        device = next(self.model.parameters()).device.type
        if recipe.by == "mezzo":
            self.optimizer = kind.make(self.model.parameters())
            amp.decorate(
                self.model,
                self.optimizer,
                level=recipe.level,
                dtype=recipe.dtype,
                master_weight="compact" if recipe.compact else True,
            )
            self.scaler: Any = amp.GradScaler(enable=scales)
            self.region: Callable[[], Any] = lambda: amp.auto_cast(level=recipe.level, dtype=recipe.dtype)
        else:
            how = {"fused": True} if recipe.level == "fused" else {"foreach": True}
            self.optimizer = kind.make(self.model.parameters(), **how)
            self.scaler = torch.amp.GradScaler(device, enabled=scales)
            half = torch.float16 if scales else torch.bfloat16
            self.region = lambda: torch.autocast(device, dtype=half, enabled=recipe.dtype != "float32")

    def step(self) -> float:
        """Train one step as users write it, and read the loss."""
        with self.region():
            loss = self.task.loss_fn(self.model(self.task.inputs), self.task.targets)
        self.scaler.scale(loss).backward()
        if self.recipe.clips:
            self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.recipe.keeps_grads)
        return loss.item()

    def _clip(self) -> None:
        if self.recipe.by == "mezzo":
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
            return
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def make_grads(self) -> None:
        """Leave gradients behind, unscaled, for the update alone."""
        with self.region():
            loss = self.task.loss_fn(self.model(self.task.inputs), self.task.targets)
        loss.backward()


class SmallNet(nn.Module):
    """71 small layers, 142 tensors, each added to what it got: a network whose step is bound by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SMALL_SIZE, SMALL_SIZE) for _ in range(SMALL_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output for inputs of shape (batch, 64)."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def small_net_task(device: torch.device) -> Task:
    """Return the network of many small tensors with uniform data; the same numbers at every call."""
    torch.manual_seed(SEED)
    with device:
        model = SmallNet()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.01, 0.01)
        inputs, targets = torch.rand(SMALL_BATCH, SMALL_SIZE), torch.rand(SMALL_BATCH, SMALL_SIZE)
    return Task(model, inputs, targets, nn.functional.mse_loss)


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
    """Train SimpleNet and SmallNet (142 small tensors) by every recipe; return times, memory and losses.

    Args:
        size: Width of SimpleNet; None: 8192 on a GPU, 256 on a CPU.
        batch_size: Of SimpleNet; None: 2048 on a GPU, 64 on a CPU.
        steps: Timed steps of each recipe; three warm-up steps come before them and train too.
        models: Some of SimpleNet, SmallNet; None: both.
        optimizers: Some of SGD, SGD momentum, AdamW; None: all.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        progress: Called after every step.
    """
    place = find_device(device, "mezzo bench step")
    makers: dict[str, Callable[[], Task]] = {
        "SimpleNet": lambda: simple_net_task(settings.size, settings.batch_size, place),
        "SmallNet": lambda: small_net_task(place),
    }
    default_size, default_batch_size = (8192, 2048) if place.type == "cuda" else (256, 64)
    settings = Settings(
        device=str(place),
        size=default_size if size is None else size,
        batch_size=default_batch_size if batch_size is None else batch_size,
        steps=steps,
        models=chosen("--model", models, tuple(makers)),
        optimizers=chosen("--optimizer", optimizers, tuple(kind.name for kind in _OPTIMIZERS)),
    )
    copy_bytes_per_s = _copy_bandwidth(place)  # before all else: after a minute of training a run found a tenth less
    results = []
    for model in settings.models:
        for kind in _OPTIMIZERS:
            for recipe in _recipes(kind) if kind.name in settings.optimizers else ():
                results.append(_measure(model, makers[model](), kind, recipe, settings, place, progress))
                release_memory(place)
    return StepBench(
        settings=settings,
        results=tuple(results),
        copy_bytes_per_s=copy_bytes_per_s,
        machine=read_machine(place),
    )


def _measure(
    model: str,
    task: Task,
    kind: OptimizerKind,
    recipe: Recipe,
    settings: Settings,
    device: torch.device,
    progress: Progress | None,
) -> StepResult:
    tf32_before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = recipe.level == "TF32"
    try:
        training = _Training(recipe, task, kind)
        losses: list[float] = []
        total = settings.warmup_steps + settings.steps

        def after_step() -> None:
            if len(losses) == settings.warmup_steps and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            if progress is not None:
                progress(f"{model}, {kind.name}, {recipe.name}", len(losses), total)

        timing = time_calls(
            lambda: losses.append(training.step()),
            calls=settings.steps,
            warmup_calls=settings.warmup_steps,
            device=device,
            after_call=after_step,
        )
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        training.optimizer.zero_grad(set_to_none=True)
        training.make_grads()
        update = time_on_device(training.optimizer.step, calls=10, warmup_calls=2, device=device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32_before
    parameters = sum(p.numel() for p in training.model.parameters())
    return StepResult(
        model=model,
        optimizer=kind.name,
        recipe=recipe,
        timing=timing,
        update_s=update.median_s,
        update_bytes=parameters * (kind.update_bytes - 2 * recipe.compact),
        loss=losses[-1],
        peak_memory_bytes=peak,
    )


def _copy_bandwidth(device: torch.device) -> float:
    elements = 2**29 if device.type == "cuda" else 2**24
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    timing = time_on_device(lambda: target.copy_(source), calls=10, warmup_calls=2, device=device)
    return 2 * elements * source.element_size() / timing.median_s
