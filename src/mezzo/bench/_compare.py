"""One model trained in float32, AMP-O1 and AMP-O2, or O3, from the same start on the same batch (guide, 2.1)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from mezzo._timer import Timing, release_memory, time_calls, unsteady_note
from mezzo.amp import Fp8Recipe, debugging, explain, has_half_units
from mezzo.amp.debugging import operator_log
from mezzo.bench._clocks import Machine, read_machine
from mezzo.bench._device import find_device
from mezzo.bench._settings import refuse_below_one
from mezzo.bench._task import SEED, find_place, load_task, simple_net_task
from mezzo.dtypes import dtype_name, parse_half_dtype
from mezzo.errors import MezzoError, RunError, unknown_choice
from mezzo.fp8 import FP8_LINEAR, recipe_for, why_no_fp8
from mezzo.proof import MATRIX_PRODUCTS, Setup, Task, Trainer, random_states_kept, seed_all, torch_state

MODES = {"O0": "float32", "O1": "AMP-O1", "O2": "AMP-O2", "O3": "AMP-O3"}
DEFAULT_LEVELS = ("O1", "O2")
"""The levels that are compared with float32 unless the caller names others."""
WARMUP_STEPS = 3
LEARNING_RATE = 0.003  # SimpleNet falls from 0.67 to 0.41 in 23 steps at any width, smoothly
LARGE_GPU_BYTES = 40 * 10**9
_DRAWN_BY_DTYPE = ("rand_like", "randn_like", "uniform_", "normal_", "exponential_")
"""Operators that draw other numbers for a half tensor than for a float32 one, on a CPU too."""


Progress = Callable[[str, int, int], None]
"""Told the mode, the steps done in it and the steps it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `compare` is asked to do, with the defaults of the device filled in."""

    model: str
    device: str
    dtype: str
    size: int | None
    batch_size: int | None
    """Samples of the batch that was trained on; None where a factory's own inputs do not tell."""
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
    """What one mode took and reached."""

    name: str
    level: str
    timing: Timing
    first_loss: float
    last_loss: float
    peak_memory_bytes: int | None
    """Highest memory allocated on the GPU during the timed steps; None on a CPU, where torch does not count it."""
    fp8_products: tuple[int, int] | None = None
    """O3: matrix products of a forward that were FP8, and all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The modes side by side; `table()` is the guide's 2.1.4."""

    settings: Settings
    modes: tuple[ModeResult, ...]
    machine: Machine
    operator_table: str
    operators: list[dict[str, Any]] = field(repr=False)
    """Rows of `mezzo.amp.debugging.OperatorStats` for one step of a mode."""

    operators_of: str = "AMP-O1"
    """That mode: AMP-O1, or the last one where O1 is not compared."""

    note: str = ""
    """What a reader must know: operators that compute inside in float32 on this CPU, times that are not steady, layers that
    are not FP8 at O3."""

    def speedup(self, mode: ModeResult) -> float:
        """Return how many times as fast as float32 a mode is, by the medians of this run."""
        return self.modes[0].timing.median_s / mode.timing.median_s

    def table(self) -> list[list[str]]:
        """Return the rows of the guide's table, header first."""
        last_step = self.settings.warmup_steps + self.settings.steps
        rows = [
            ["-", *(mode.name for mode in self.modes)],
            ["time per step", *(_duration(mode.timing.median_s) for mode in self.modes)],
            ["loss at step 1", *(f"{mode.first_loss:.7f}" for mode in self.modes)],
            [f"loss at step {last_step}", *(f"{mode.last_loss:.7f}" for mode in self.modes)],
            ["speed-up", *(f"{self.speedup(mode):.2f}x" for mode in self.modes)],
            ["peak memory", *(_gibibytes(mode.peak_memory_bytes) for mode in self.modes)],
        ]
        if any(mode.fp8_products is not None for mode in self.modes):
            rows.append(["FP8 products", *(_share(mode.fp8_products) for mode in self.modes)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data, times in seconds and memory in bytes."""
        modes = [
            {
                **asdict(mode),
                "timing": {
                    "median_s": mode.timing.median_s,
                    "spread_s": mode.timing.spread_s,
                    "times_s": mode.timing.times_s,
                },
                "speedup": self.speedup(mode),
            }
            for mode in self.modes
        ]
        return {
            "settings": asdict(self.settings),
            "modes": modes,
            "machine": asdict(self.machine),
            "operators": self.operators,
            "operators_of": self.operators_of,
            "note": self.note,
        }


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
    """Train a model in float32 and at some levels, and return time, loss, memory and the operators of one step.

    Args:
        model: FILE:FACTORY of the user's model (`load_task`); None: the guide's nine-layer SimpleNet.
        size: Width of SimpleNet; None: by device.
        batch_size: None: by device, or the factory's own. A factory that takes `batch_size` gets it; one that makes its own
            batch and does not take it is refused.
        steps: Timed steps; three warm-up steps come before them and train too.
        dtype: float16 (with a GradScaler) or bfloat16 (without); None: float16, bfloat16 on a CPU that has units for it.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        learning_rate: Of the SGD.
        levels: O1, O2 and O3, in the order of the columns; float32 (or O0) is the first column, named or not.
        fp8: O3: an `Fp8Recipe`, or a mapping of its settings; products are emulated where the device has none.
        progress: Called after every step.
    """
    place = find_device(device, "mezzo compare")
    default_size, default_batch_size = default_sizes(place)
    samples = default_batch_size if batch_size is None else batch_size
    settings = Settings(
        model=model or "SimpleNet",
        device=str(place),
        dtype=dtype_name(parse_half_dtype(default_dtype(place) if dtype is None else dtype)),
        size=None if model else default_size if size is None else size,
        batch_size=samples,
        steps=steps,
        learning_rate=learning_rate,
        levels=_known(levels),
        fp8=recipe_for(place, fp8).to_dict() if "O3" in levels else None,
    )
    if fp8 is not None and settings.fp8 is None:
        raise ValueError("--fp8 is about level O3, which is not compared; add O3 to --levels")
    if model is not None and size is not None:
        raise ValueError("--size is the width of SimpleNet; with --model the factory decides")
    try:
        with random_states_kept([place] if place.type == "cuda" else []):
            if model is None:
                assert settings.size is not None
                make_task = functools.partial(simple_net_task, settings.size, samples, place)
            else:
                task = load_task(model, samples, is_chosen=batch_size is not None)
                settings = replace(settings, batch_size=task.batch_size)
                make_task = functools.partial(task.copied, place)
            return _compare(settings, make_task, place, progress)
    except MezzoError:
        raise
    except Exception as error:  # the user's own code runs in here; a fault of ours keeps its traceback below
        if _is_out_of_memory(error):
            raise RunError(_out_of_memory(settings)) from error
        if model is None:  # nothing of the user's was run: a defect of ours, which keeps its traceback
            raise
        raise RunError(f"{find_place(error, model)}: training failed: {type(error).__name__}: {error}") from error


def default_sizes(device: torch.device) -> tuple[int, int]:
    """Return the width and batch size that show the speed-up on this device without filling it."""
    if device.type != "cuda":
        return 1024, 256
    is_large = torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return (8192, 2048) if is_large else (4096, 1024)


def default_dtype(device: torch.device) -> str:
    """Return the half dtype that a device is fast in; a GPU is in both, and float16 is the guide's."""
    return "bfloat16" if device.type == "cpu" and has_half_units(torch.bfloat16) else "float16"


def _compare(
    settings: Settings, make_task: Callable[[], Task], device: torch.device, progress: Progress | None
) -> Comparison:
    modes = []
    recorded = "O1" if "O1" in settings.levels else settings.levels[-1]
    stats, of_fp8, of_random = debugging.OperatorStats(), "", ""
    for level in settings.levels:
        trainer = Trainer(make_task(), _setup(level, settings))
        mode = _run_mode(MODES[level], trainer, settings, device, progress)
        state = torch_state(device)
        seen = _record_step(trainer) if level in (recorded, "O3") else None
        if seen is not None and level == recorded:
            stats = seen
            of_random = "" if torch.equal(state, torch_state(device)) else _random_note(seen, device)
        if seen is not None and level == "O3":
            mode, of_fp8 = replace(mode, fp8_products=_count_products(seen)), _fp8_note(trainer, seen, device)
        modes.append(mode)
        del trainer
        release_memory(device)
    machine = read_machine(device)
    timings = {mode.name: mode.timing for mode in modes}
    return Comparison(
        settings=settings,
        modes=tuple(modes),
        machine=machine,
        operator_table=stats.table(),
        operators=[asdict(row) for row in stats.rows],
        operators_of=MODES[recorded],
        note=" ".join(filter(None, (_note(settings.dtype, device), unsteady_note(timings), of_random, of_fp8))),
    )


def _note(dtype: str, device: torch.device) -> str:
    if device.type != "cpu" or has_half_units(parse_half_dtype(dtype)):
        return ""
    return (
        f"This CPU has no fast {dtype} units: matrix products take and give {dtype} and compute inside in float32, "
        "so they are counted as FP32, with casts around them; a speed-up is not to be expected."
    )


def _random_note(stats: debugging.OperatorStats, device: torch.device) -> str:
    """Return why columns of a model that draws random numbers differ, although all of them have the same seeds."""
    by_dtype = [row.op for row in stats.rows if row.op in _DRAWN_BY_DTYPE and row.fp16 + row.bf16]
    if device.type != "cuda" and not by_dtype:
        return ""  # on a CPU dropout draws the same mask in every dtype
    return (
        "The model draws random numbers (dropout, noise). Every mode has the same seeds, but torch may draw other numbers for "
        "half tensors than for float32 ones: the losses of the modes may differ by that too; switch it off to compare them."
    )


def _run_mode(
    name: str, trainer: Trainer, settings: Settings, device: torch.device, progress: Progress | None
) -> ModeResult:
    total = settings.warmup_steps + settings.steps

    def after_step() -> None:
        seed_all(SEED + len(trainer.losses))  # step by step: a mode may draw more or fewer numbers in one
        if len(trainer.losses) == settings.warmup_steps and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if progress is not None:
            progress(name, len(trainer.losses), total)

    seed_all(SEED)
    timing = time_calls(
        trainer.step,
        calls=settings.steps,
        warmup_calls=settings.warmup_steps,
        device=device,
        after_call=after_step,
    )
    return ModeResult(
        name=name,
        level=trainer.setup.level,
        timing=timing,
        first_loss=float(trainer.losses[0]),
        last_loss=float(trainer.losses[-1]),
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def _setup(level: str, settings: Settings) -> Setup:
    recipe = Fp8Recipe.of(settings.fp8) if level == "O3" else None
    return Setup(level=level, dtype=settings.dtype, learning_rate=settings.learning_rate, fp8=recipe)


def _record_step(trainer: Trainer) -> debugging.OperatorStats:
    with debugging.collect_operator_stats(print_table=False) as stats:
        trainer.step()
    return stats


def _known(levels: Sequence[str]) -> tuple[str, ...]:
    """Return the levels that were asked for, float32 first, each once."""
    asked = ["O0" if level == MODES["O0"] else level for level in levels]
    for level in asked:
        if level not in MODES:
            raise ValueError(unknown_choice("--levels", level, (MODES["O0"], *MODES)))
    return tuple(dict.fromkeys(("O0", *asked)))


def _count_products(stats: debugging.OperatorStats) -> tuple[int, int]:
    """Return how many matrix products of the forward were FP8, and how many there were."""
    calls = [
        (row.op, row.fp16 + row.bf16 + row.fp32 + row.other)
        for row in stats.rows
        if row.phase == "forward" and row.op in MATRIX_PRODUCTS
    ]
    return sum(count for op, count in calls if op == FP8_LINEAR), sum(count for _, count in calls)


def _fp8_note(trainer: Trainer, stats: debugging.OperatorStats, device: torch.device) -> str:
    """Return which layers were FP8 in a step and why the others were not, and whether FP8 was emulated."""
    policy = trainer.policy
    assert policy is not None
    assert policy.fp8 is not None
    computed = {row.module for row in stats.rows if row.op == FP8_LINEAR}
    layers = f"AMP-O3: {explain(trainer.model, policy).fp8_layers(computed)}."
    if not policy.fp8.emulate or not computed:
        return layers
    reason = why_no_fp8(device) or "as asked for"
    return f"{layers} Its FP8 products are emulated ({reason}): its losses hold, its times and memory mean nothing."


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory"))


def _out_of_memory(settings: Settings) -> str:
    if settings.size is None:
        batch = "its own batch" if settings.batch_size is None else f"a batch of {settings.batch_size}"
        return f"out of memory on {settings.device} with {batch}; give a smaller --batch-size, or make a smaller batch"
    return (
        f"out of memory on {settings.device} with --size {settings.size} --batch-size {settings.batch_size}; "
        "choose a smaller --size or --batch-size"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 0.1 else f"{seconds * 1000:.3f}ms"


def _share(counts: tuple[int, int] | None) -> str:
    return "-" if counts is None else f"{counts[0]} of {counts[1]}"


def _gibibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
