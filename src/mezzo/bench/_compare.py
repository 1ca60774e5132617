"""One model trained in float32, AMP-O1 and AMP-O2, or O3, from the same start on the same batch (AMP guide, 2.1)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from mezzo.amp import Fp8Recipe, debugging, explain, has_half_units
from mezzo.bench._frame import Bench, Meter, Progress, gibibytes, measure_each, refuse_below_one
from mezzo.bench._machine import read_machine
from mezzo.bench._workloads import SEED, batch_words, failures_explained, load_workload, simple_net_workload
from mezzo.devices import find_device
from mezzo.dtypes import dtype_name, parse_half_dtype
from mezzo.errors import unknown_choice
from mezzo.fp8 import FP8_LINEAR, recipe_for, why_no_fp8
from mezzo.proof import MATRIX_PRODUCTS
from mezzo.record import Timing, operator_log, unsteady_note
from mezzo.trial import Trial, TrialSetup, Workload, random_states_kept, seed_all, torch_state

MODES = {"O0": "float32", "O1": "AMP-O1", "O2": "AMP-O2", "O3": "AMP-O3"}
DEFAULT_LEVELS = ("O1", "O2")
"""The levels that are compared with float32 unless the caller names others."""
WARMUP_STEPS = 3
LEARNING_RATE = 0.003  # SimpleNet falls from 0.67 to 0.41 in 23 steps at any width, smoothly
LARGE_GPU_BYTES = 40 * 10**9
_DRAWN_BY_DTYPE = ("rand_like", "randn_like", "uniform_", "normal_", "exponential_")
"""Operators that draw other numbers for a half tensor than for a float32 one, also on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings:
    """What `compare` does, with the defaults of the device filled in."""

    model: str
    device: str
    dtype: str
    size: int | None
    batch_size: int | None
    """Samples in the batch; None if the factory's own inputs do not show it."""
    steps: int
    learning_rate: float
    levels: tuple[str, ...] = ("O0", *DEFAULT_LEVELS)
    fp8: dict[str, Any] | None = None
    """The recipe of O3; None: O3 is not compared."""
    warmup_steps: int = WARMUP_STEPS

    def __post_init__(self) -> None:
        refuse_below_one(self, "size", "batch_size", "steps")
        if not self.learning_rate > 0:
            raise ValueError(f"--learning-rate {self.learning_rate}: must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeResult:
    """Time, memory and losses of one mode."""

    name: str
    level: str
    timing: Timing
    first_loss: float
    last_loss: float
    peak_memory_bytes: int | None
    """Highest memory allocated on the GPU during the timed steps; None on a CPU, where torch does not count it."""
    fp8_products: tuple[int, int] | None = None
    """O3: number of FP8 matrix products in a forward pass, and of all matrix products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Bench[CompareSettings, ModeResult]):
    """The modes side by side; `table()` is the table of the AMP guide, 2.1.4."""

    operator_table: str
    operators: list[dict[str, Any]] = field(repr=False)
    """Rows of `mezzo.amp.debugging.OperatorStats` for one step of the mode `operators_of`."""
    operators_of: str = "AMP-O1"
    """AMP-O1, or the last mode if O1 is not compared."""
    note: str = ""
    """Warnings: operators that this CPU computes in float32, unsteady times, layers that are not FP8 at O3."""

    @property
    def modes(self) -> tuple[ModeResult, ...]:
        """The results, float32 first."""
        return self.results

    def speedup(self, mode: ModeResult) -> float:
        """Return the speed-up over float32, by the medians of this run."""
        return self.modes[0].timing.median_s / mode.timing.median_s

    def cells(self, result: ModeResult) -> dict[str, str]:
        """Return one column of the table."""
        last_step = self.settings.warmup_steps + self.settings.steps
        column = {
            "-": result.name,
            "time per step": _duration(result.timing.median_s),
            "loss at step 1": f"{result.first_loss:.7f}",
            f"loss at step {last_step}": f"{result.last_loss:.7f}",
            "speed-up": f"{self.speedup(result):.2f}x",
            "peak memory": gibibytes(result.peak_memory_bytes),
        }
        if any(mode.fp8_products is not None for mode in self.modes):
            counts = result.fp8_products
            column["FP8 products"] = "-" if counts is None else f"{counts[0]} of {counts[1]}"
        return column

    def figures(self, result: ModeResult) -> dict[str, Any]:
        """Return the speed-up of a mode, and the time of each step."""
        timing = result.timing
        times = {"median_s": timing.median_s, "spread_s": timing.spread_s, "times_s": timing.times_s}
        return {"timing": times, "speedup": self.speedup(result)}

    def table(self) -> list[list[str]]:
        """Return the table with one column per mode."""
        return [list(row) for row in zip(*Bench.table(self), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data, times in seconds and memory in bytes."""
        data = Bench.to_dict(self)
        del data["operator_table"]
        return {"settings": data["settings"], "modes": data.pop("results"), **data}


@operator_log.paused()
def compare(
    *,
    model: str | None = None,
    size: int | None = None,
    batch_size: int | None = None,
    steps: int = 20,
    dtype: str | None = None,
    device: str | None = None,
    learning_rate: float = LEARNING_RATE,
    levels: Sequence[str] = DEFAULT_LEVELS,
    fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Train a model in float32 and at other levels; return time, loss, memory and the operators of one step.

    Args:
        model: FILE:FACTORY of the user's model (`load_workload`); None: the guide's nine-layer SimpleNet.
        size: Width of SimpleNet; None: by device.
        batch_size: None: by device, or the batch that the factory makes. A factory that makes its own batch and does
            not take `batch_size` is an error.
        steps: Timed steps; three warm-up steps come before them and train too.
        dtype: float16 (with a GradScaler) or bfloat16 (without); None: float16, on a CPU with bfloat16 units bfloat16.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        learning_rate: Of the SGD.
        levels: O1, O2 and O3, in the order of the columns; float32 is always the first column.
        fp8: O3: an `Fp8Recipe`, or a mapping of its settings; a device without FP8 products emulates them.
        progress: Called after every step.
    """
    place = find_device(device)
    default_size, default_batch_size = default_sizes(place)
    samples = default_batch_size if batch_size is None else batch_size
    settings = CompareSettings(
        model=model or "SimpleNet",
        device=str(place),
        dtype=dtype_name(parse_half_dtype(default_dtype(place) if dtype is None else dtype)),
        size=None if model else default_size if size is None else size,
        batch_size=samples,
        steps=steps,
        learning_rate=learning_rate,
        levels=_check_levels(levels),
        fp8=recipe_for(place, fp8).to_dict() if "O3" in levels else None,
    )
    if fp8 is not None and settings.fp8 is None:
        raise ValueError("--fp8 is about level O3, which is not compared; add O3 to --levels")
    if model is not None and size is not None:
        raise ValueError("--size is the width of SimpleNet; with --model the factory decides")
    with random_states_kept([place] if place.type == "cuda" else []):
        if settings.size is None:
            workload = load_workload(settings.model, samples, is_chosen=batch_size is not None)
            settings = replace(settings, batch_size=workload.batch_size)
            make_workload = functools.partial(workload.copied, place)
            batch, advice = batch_words(workload.batch_size), ""
        else:
            make_workload = functools.partial(simple_net_workload, settings.size, samples, place)
            batch = f"--size {settings.size} --batch-size {samples}"
            advice = "choose a smaller --size or --batch-size"
        with failures_explained(settings.model, place, batch, advice):
            return _compare(settings, make_workload, place, progress)


def default_sizes(device: torch.device) -> tuple[int, int]:
    """Return a width and a batch size that show the speed-up on this device and fit in its memory."""
    if device.type != "cuda":
        return 1024, 256
    is_large = torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return (8192, 2048) if is_large else (4096, 1024)


def default_dtype(device: torch.device) -> str:
    """Return a half dtype that the device is fast in; on a GPU float16, as in the AMP guide."""
    return "bfloat16" if device.type == "cpu" and has_half_units(torch.bfloat16) else "float16"


def _compare(
    settings: CompareSettings, make_workload: Callable[[], Workload], device: torch.device, progress: Progress | None
) -> Comparison:
    recorded = "O1" if "O1" in settings.levels else settings.levels[-1]
    stats = debugging.OperatorStats()
    notes = {"half": _half_note(settings.dtype, device), "unsteady": "", "random": "", "fp8": ""}

    def measure(level: str) -> ModeResult:
        nonlocal stats
        recipe = Fp8Recipe.of(settings.fp8) if level == "O3" else None
        setup = TrialSetup(level=level, dtype=settings.dtype, learning_rate=settings.learning_rate, fp8=recipe)
        trial = Trial(make_workload(), setup)
        mode = _run_mode(MODES[level], trial, settings, device, progress)
        if level not in (recorded, "O3"):
            return mode
        state = torch_state(device)
        with debugging.collect_operator_stats(print_table=False) as seen:
            trial.step()
        if level == recorded:
            stats = seen
            notes["random"] = "" if torch.equal(state, torch_state(device)) else _random_note(seen, device)
        if level == "O3":
            notes["fp8"] = _fp8_note(trial, seen, device)
            mode = replace(mode, fp8_products=_count_products(seen))
        return mode

    modes = measure_each(settings.levels, measure, device)
    notes["unsteady"] = unsteady_note({mode.name: mode.timing for mode in modes})
    return Comparison(
        settings=settings,
        results=modes,
        machine=read_machine(device),
        operator_table=stats.table(),
        operators=[asdict(row) for row in stats.rows],
        operators_of=MODES[recorded],
        note=" ".join(filter(None, notes.values())),
    )


def _run_mode(
    name: str, trial: Trial, settings: CompareSettings, device: torch.device, progress: Progress | None
) -> ModeResult:
    total = settings.warmup_steps + settings.steps
    # Each step gets its own seed: one mode may draw more or fewer random numbers per step than another.
    meter = Meter(name, total, device, progress, between_steps=lambda done: seed_all(SEED + done))
    seed_all(SEED)
    meter.warm_up(trial.step, settings.warmup_steps)
    meter.reset_peak()
    timing = meter.time(trial.step, settings.steps)
    return ModeResult(
        name=name,
        level=trial.setup.level,
        timing=timing,
        first_loss=float(trial.losses[0]),
        last_loss=float(trial.losses[-1]),
        peak_memory_bytes=meter.peak_memory_bytes(),
    )


def _half_note(dtype: str, device: torch.device) -> str:
    if device.type != "cpu" or has_half_units(parse_half_dtype(dtype)):
        return ""
    return (
        f"This CPU has no fast {dtype} units: matrix products take and return {dtype} and compute in float32. "
        "They are counted as FP32, with casts around them; do not expect a speed-up."
    )


def _random_note(stats: debugging.OperatorStats, device: torch.device) -> str:
    """Return why the modes of a model with random numbers differ although they share their seeds."""
    by_dtype = [row.op for row in stats.rows if row.op in _DRAWN_BY_DTYPE and row.fp16 + row.bf16]
    if device.type != "cuda" and not by_dtype:
        return ""  # on a CPU dropout draws the same mask in every dtype
    return (
        "The model draws random numbers, and torch may draw other numbers for half tensors than for float32 ones. "
        "This also makes the losses of the modes differ; switch it off to compare them."
    )


def _check_levels(levels: Sequence[str]) -> tuple[str, ...]:
    """Return the levels without duplicates, float32 first."""
    names = ["O0" if level == MODES["O0"] else level for level in levels]
    for level in names:
        if level not in MODES:
            raise ValueError(unknown_choice("--levels", level, (MODES["O0"], *MODES)))
    return tuple(dict.fromkeys(("O0", *names)))


def _count_products(stats: debugging.OperatorStats) -> tuple[int, int]:
    """Return the number of FP8 matrix products in the forward pass, and of all matrix products."""
    calls = [
        (row.op, row.fp16 + row.bf16 + row.fp32 + row.other)
        for row in stats.rows
        if row.phase == "forward" and row.op in MATRIX_PRODUCTS
    ]
    return sum(count for op, count in calls if op == FP8_LINEAR), sum(count for _, count in calls)


def _fp8_note(trial: Trial, stats: debugging.OperatorStats, device: torch.device) -> str:
    """Return which layers were FP8, why others were not, and whether FP8 was emulated."""
    policy = trial.precision.policy
    assert policy is not None
    assert policy.fp8 is not None
    computed = {row.module for row in stats.rows if row.op == FP8_LINEAR}
    layers = f"AMP-O3: {explain(trial.model, policy).fp8_layers(computed)}."
    if not policy.fp8.emulate or not computed:
        return layers
    reason = why_no_fp8(device) or "as asked for"
    return f"{layers} Its FP8 products are emulated ({reason}): its losses are valid, its times and memory are not."


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 0.1 else f"{seconds * 1000:.3f}ms"
