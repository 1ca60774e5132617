"""What `mezzo bench static` measured, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mezzo.bench._frame import Bench, gibibytes, milliseconds, ratio, refuse_below_one
from mezzo.bench._machine import peak_rate
from mezzo.bench._networks import NetworkSizes
from mezzo.bench._profile import KernelShare, time_by_kind
from mezzo.bench._static_recipes import StaticRecipe
from mezzo.record import Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticSettings:
    """What is measured."""

    device: str
    models: tuple[str, ...]
    size: int
    """Width of SimpleNet."""
    simple_net_batch: int
    batch_size: int | None = None
    images: int | None = None
    image_size: tuple[int, int] | None = None
    steps: int
    check_steps: int = 50
    recipes: tuple[str, ...] | None = None
    dtype: str | None = None
    """None: that of each network."""
    fuse: bool = False
    isolate: bool = False
    budget_s: float | None = None
    warm_caches: int = 0
    at_once: int = 0
    kernels: int = 0
    """How many of the slowest kernels are printed for each recipe; 0: steps are not profiled."""
    layers: int | None = None
    length: int | None = None
    words: int | None = None
    mask: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        refuse_below_one(self, "size", "batch_size", "images", "steps", "check_steps", "layers", "length", "words")
        if self.image_size is not None and min(self.image_size) < 1:
            raise ValueError(f"--image-size {'x'.join(map(str, self.image_size))}: must be at least 1")
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"--budget {self.budget_s:g}: must be above 0 seconds")
        if self.warm_caches < 0:
            raise ValueError(f"--warm-caches {self.warm_caches}: must be at least 0, the number of processes")
        if self.at_once < 0:
            raise ValueError(f"--at-once {self.at_once}: must be at least 0, the number of processes")
        if self.kernels < 0:
            raise ValueError(f"--kernels {self.kernels}: must be at least 0, the number of kernels")

    @property
    def sizes(self) -> NetworkSizes:
        """The sizes of all networks."""
        return NetworkSizes(
            size=self.size,
            simple_net_batch=self.simple_net_batch,
            batch_size=self.batch_size,
            images=self.images,
            image_size=self.image_size,
            layers=self.layers,
            length=self.length,
            words=self.words,
            mask=self.mask,
            recompute=self.recompute,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticResult:
    """Time, memory and loss of one recipe."""

    model: str
    recipe: StaticRecipe
    dtype: str = "float16"
    shape: tuple[int, ...] = ()
    """Of the inputs of a batch."""
    samples: int
    """In a batch: samples, or tokens of a language model."""
    unit: str = "samples"
    flops: float | None = None
    """Floating-point operations of a step, recomputation not counted; None: not known."""
    build_s: float
    """The first step: tracing, compiling, capturing."""
    cold_build_s: float | None = None
    """The first step before the caches were warm; None: they were not warmed."""
    timing: Timing
    """Steps whose loss the host reads, one by one."""
    queued_s: float
    """A step when the host waits only at the end of a round of steps; the median of three rounds."""
    loss: float
    """After the check: the mean of the last pass over its batches."""
    scale: float | None = None
    """The loss scale after the check; None: the loss is not scaled."""
    skipped: int = 0
    """Steps of the check that changed nothing because a gradient was not finite."""
    form: str = ""
    """Graph mode: whether the step runs compiled or as written."""
    peak_memory_bytes: int | None
    kernels: tuple[KernelShare, ...] = ()
    """Of one step, the longest first; empty unless asked for."""

    def __str__(self) -> str:
        form = f" ({self.form})" if self.form else ""
        rate = f"{self.samples / self.queued_s:.0f} {self.unit}/s"
        return (
            f"{self.model}, {self.recipe.name}{form}: {milliseconds(self.queued_s)} queued, {rate}, first step "
            f"{self.build_s:.1f} s, peak memory {gibibytes(self.peak_memory_bytes)}, loss {self.loss:.6f}, "
            f"skipped {self.skipped}"
        )

    def slowest_kernels(self, most: int) -> list[str]:
        """Return a line for each of the slowest kernels of a step: time, calls, name."""
        return [f"  {1e3 * each.time_s:9.3f} ms {each.calls:7.1f} x {each.name[:120]}" for each in self.kernels[:most]]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRun:
    """A recipe without a result."""

    model: str
    recipe: StaticRecipe
    reason: str
    is_failure: bool
    """False: it was over the budget."""

    def __str__(self) -> str:
        return f"{self.model}, {self.recipe.name}: not run: {self.reason}"

    def slowest_kernels(self, most: int) -> list[str]:
        """Return no lines."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBench(Bench[StaticSettings, StaticResult]):
    """All recipes of one run."""

    not_run: tuple[NotRun, ...] = ()

    def best_stock(self, model: str, *, queued: bool = True) -> StaticResult | None:
        """Return the fastest stock recipe of a model with float32 weights; None if none was run."""
        rivals = (
            each
            for each in self.results
            if (each.model, each.recipe.by) == (model, "stock") and each.recipe.has_masters
        )
        return min(rivals, key=lambda each: _time_of(each, queued), default=None)

    def speedup_over_best(self, result: StaticResult, *, queued: bool) -> float | None:
        """Return the speed-up over the fastest stock recipe of the same model; None if none was run."""
        best = self.best_stock(result.model, queued=queued)
        return None if best is None else _time_of(best, queued) / _time_of(result, queued)

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

        def compiled(keeps_grads: bool) -> str:
            return _pair(*(self.speedup(result, queued=queued, keeps_grads=keeps_grads) for queued in (False, True)))

        cold = "" if result.cold_build_s is None else f" (cold {result.cold_build_s:.1f} s)"
        keeps_grads = any(each.recipe.keeps_grads for each in self.results)
        return {
            "model": result.model,
            "recipe": f"{result.recipe.name} ({result.form})" if result.form else result.recipe.name,
            "step, loss read": milliseconds(result.timing.median_s),
            "spread": milliseconds(result.timing.spread_s),
            "step, queued": milliseconds(result.queued_s),
            "rate, queued": f"{result.samples / result.queued_s:.0f} {result.unit}/s",
            "x best stock, read / queued": _pair(*(self.speedup_over_best(result, queued=q) for q in (False, True))),
            **(
                {"x compiled stock": compiled(False), "x compiled stock, grads kept": compiled(True)}
                if keeps_grads
                else {}
            ),
            **(self._arithmetic(result) if any(each.flops is not None for each in self.results) else {}),
            "first step": f"{result.build_s:.1f} s{cold}",
            "peak memory": gibibytes(result.peak_memory_bytes),
            "loss": f"{result.loss:.6f}",
            "scale": "-" if result.scale is None else f"{result.scale:g}",
            "skipped": str(result.skipped),
            "dtype": result.dtype,
            "batch": "x".join(map(str, result.shape)),
        }

    def utilisation(self, result: StaticResult) -> float | None:
        """Return the share of the device's half-precision rate that a step uses (MFU); None if it is not known."""
        rate = peak_rate(self.machine.device)
        return None if rate is None or result.flops is None else result.flops / result.queued_s / rate

    def _arithmetic(self, result: StaticResult) -> dict[str, str]:
        share = self.utilisation(result)
        return {
            "TFLOP/s": "-" if result.flops is None else f"{result.flops / result.queued_s / 1e12:.3g}",
            "MFU": "-" if share is None else f"{share:.1%}",
        }

    def table(self) -> list[list[str]]:
        """Return the header and one row per result; then the recipes that were not run, with the reason."""
        rows = Bench.table(self) or [["model", "recipe", "step, loss read"]]
        missing = [""] * (len(rows[0]) - 3)
        return [*rows, *([each.model, each.recipe.name, f"not run: {each.reason}", *missing] for each in self.not_run)]

    def tables(self) -> list[list[list[str]]]:
        """Return the table of the recipes and, if they were profiled, that of their kernels."""
        return [rows for rows in (self.table(), self.profile_table()) if rows]

    def profile_table(self) -> list[list[str]]:
        """Return milliseconds and launches per step by kind of work, a row per profiled recipe; empty without any."""
        profiled = [(each, time_by_kind(each.kernels)) for each in self.results if each.kernels]
        kinds = list(dict.fromkeys(kind for _, found in profiled for kind in found))
        rows = [
            [
                each.model,
                each.recipe.name,
                f"{1e3 * sum(seconds for seconds, _ in found.values()):.2f} ms",
                *(f"{1e3 * found[kind][0]:.2f} ms in {found[kind][1]:.0f}" if kind in found else "-" for kind in kinds),
            ]
            for each, found in profiled
        ]
        return [["model", "recipe", "on the GPU", *kinds], *rows] if rows else []

    def figures(self, result: StaticResult) -> dict[str, Any]:
        """Return the name and the speed-ups of a recipe."""
        speedups = {
            f"speedup_over_compiled_stock{'_grads_kept' * kept}{'_queued' * queued}": self.speedup(
                result, queued=queued, keeps_grads=kept
            )
            for kept in (False, True)
            for queued in (False, True)
        }
        over_best = {
            f"speedup_over_best_stock{'_queued' * queued}": self.speedup_over_best(result, queued=queued)
            for queued in (False, True)
        }
        best = self.best_stock(result.model)
        return {
            "recipe": {**asdict(result.recipe), "name": result.recipe.name},
            f"{result.unit}_per_s": result.samples / result.queued_s,
            "best_stock": None if best is None else best.recipe.name,
            "model_flops_utilisation": self.utilisation(result),
            **over_best,
            **speedups,
        }


def _time_of(result: StaticResult, queued: bool) -> float:
    return result.queued_s if queued else result.timing.median_s


def _pair(read: float | None, queued: float | None) -> str:
    return f"{ratio(read)} / {ratio(queued)}"
