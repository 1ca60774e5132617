"""Level O3 beside O2 and stock torch: speed, memory, losses, the table of shapes, and hardware against emulation.

    PYTHONPATH=src python benchmarks/fp8.py --json fp8.json                # one H200, about eight minutes
    PYTHONPATH=src python benchmarks/fp8.py --small --parts simple,shapes  # tiny and emulated, on a CPU

Each part has seconds to spend (`--budget` for all of them); what it had no time for, and what failed, is listed at its end.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "fp8"))
import transformer

from mezzo import Precision
from mezzo._torch.step_tier import step_tier, uses_triton
from mezzo.bench import OPTIMIZERS, StepRecipe, TrainingLoop, make_training, read_machine, simple_net_workload
from mezzo.fp8 import E4M3, E5M2, FORMATS, Fp8Recipe, fp8_linear, make_operand, multiply, recipe_to_text
from mezzo.optim import attach_master
from mezzo.record import release_memory, synchronize, time_calls
from mezzo.static import capture_step

T = TypeVar("T")

SGD = OPTIMIZERS["SGD"]
STEPS = 20
ROUNDS = 3
SMOOTHED = 20
"""Steps that a loss curve is averaged over."""
SEEDS = (0, 1, 2)
SUM_ERROR = 2.0**-8
"""Largest difference of hardware and emulation allowed, as a share of the sum of absolute products. Hopper lines up the
products of an instruction by the largest and keeps some 13 bits, and with fast accumulation the running sum too; float32 keeps
24. Rounding the two factors of a product to e4m3 moves it by up to 2**-3 of itself, to e4m3 and e5m2 by 2**-4 + 2**-3."""
BUDGET_S = {"checks": 30, "emulation": 30, "simple": 150, "shapes": 60, "transformer": 200}
"""In this order: short parts that validate the others come first."""

KERNELS = {
    "quantise": ("quantise_kernel", "float8_copy", "to_fp8"),
    "amax": ("amax_kernel", "norm", "abs"),
    "update": ("sgd_kernel", "adam_kernel", "foreach", "multi_tensor"),
    "check": ("check_kernel", "rescale_kernel"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "_scaled_mm", "aten::mm", "aten::addmm", "gmma"),
}
"""Parts of the names of kernels (on a CPU: operators), in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes and device of the measurements."""

    device: torch.device
    is_small: bool

    def fp8(self, **settings: Any) -> Fp8Recipe:
        """Return a recipe; small and on devices without FP8, every product is in it, and emulated."""
        small: dict[str, Any] = {"emulate": True, "min_width": 0, "min_size": 0} if self.is_small else {}
        return Fp8Recipe(**settings, **small)


class Report:
    """The results of one part, what was left out for lack of time, and whether its goals are met."""

    def __init__(self, name: str, budget_s: float) -> None:
        self.name, self._until = name, time.monotonic() + budget_s
        self._begun = time.monotonic()
        self.found: dict[str, Any] = {}
        self.left_out: list[str] = []
        self.errors: list[str] = []
        self.goals: dict[str, bool] = {}

    def attempt(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of a call, or None if no time was left or it failed; both are noted."""
        if time.monotonic() >= self._until:
            self.left_out.append(what)
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001  one failure must not cost the other figures of a run
            traceback.print_exc()
            self.errors.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            return None

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table."""
        lines = [[str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(line[place]) for line in lines) for place in range(len(header))]
        print(f"\n{title}")
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())

    def goal(self, text: str, answers: Iterable[bool]) -> None:
        """Print and keep whether a goal is met, by all measurements and by at least one."""
        found = list(answers)
        is_met = self.goals[text] = bool(found) and all(found)
        print(f"  {'met   ' if is_met else 'MISSED'} {text}")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        if self.left_out:
            print(f"  left out, no time: {', '.join(self.left_out)}")
        for error in self.errors:
            print(f"  FAILED {error}")
        seconds = round(time.monotonic() - self._begun, 1)
        print(f"  {self.name}: {seconds} s")
        lists = {"left_out": self.left_out, "errors": self.errors, "goals": self.goals}
        return {"seconds": seconds, **lists, **self.found}


# --- simple: the guide's nine-layer network


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train it."""

    by: str
    level: str
    dtype: str
    graph: str = ""
    """captured, compiled, or empty for eager."""
    scaling: str = "current"
    fast: str = "forward"
    compact: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        more = f", {self.scaling}, fast {self.fast}" if self.level == "O3" else ""
        masters = ", compact masters" if self.compact else ""
        return f"{self.by} {self.dtype} {self.level}{more}{masters}{self.graph and f', {self.graph}'}"


def ways(sizes: Sizes) -> Iterator[Way]:
    for dtype in ("bfloat16", "float16"):
        yield Way("stock", "foreach", dtype)
        yield Way("stock", "fused", dtype)
        for graph in ("", "captured"):
            for compact in (False, True):
                yield Way("mezzo", "O2", dtype, graph, compact=compact)
                yield Way("mezzo", "O3", dtype, graph, compact=compact)
        yield Way("mezzo", "O3", dtype, "captured", fast="never")
        for compact in (False, True):
            yield Way("mezzo", "O3", dtype, "captured", scaling="delayed", fast="always", compact=compact)
        if not sizes.is_small:  # a compiler takes longer than the training
            yield Way("mezzo", "O3", dtype, "compiled", scaling="delayed", fast="always", compact=True)
            yield Way("mezzo", "O3", dtype, "compiled", compact=True)


class SimpleTraining:
    """SimpleNet trained one way; all nine layers in FP8 at O3."""

    def __init__(self, way: Way, sizes: Sizes) -> None:
        size, batch_size = (64, 32) if sizes.is_small else (8192, 2048)
        self.workload = simple_net_workload(size, batch_size, sizes.device)
        self.parameters = sum(p.numel() for p in self.workload.model.parameters() if p.dim() == 2)
        if way.by == "stock":
            training = make_training(StepRecipe("stock", way.level, way.dtype), self.workload, "SGD")
            self.step: Callable[[], float] = lambda: training.step().item()
            return
        is_fp8 = way.level == "O3"
        precision = Precision(
            way.level,
            way.dtype,
            fp8=sizes.fp8(scaling=way.scaling, fast_accumulation=way.fast) if is_fp8 else None,
            half_layers=() if is_fp8 else None,
            master_weight="compact" if way.compact else True,
        )
        optimizer = SGD.make(self.workload.model.parameters())
        precision.prepare(self.workload.model, optimizer)
        make = {"": self._eager, "captured": self._captured, "compiled": self._compiled}[way.graph]
        self.step = make(optimizer, precision)

    def _captured(self, optimizer: Any, precision: Precision) -> Callable[[], float]:
        model, loss_fn, batch = (
            self.workload.model,
            self.workload.loss_fn,
            (self.workload.inputs, self.workload.targets),
        )
        step = capture_step(model, loss_fn, optimizer, batch, precision=precision)
        return lambda: float(step(*batch).item())

    def _compiled(self, optimizer: Any, precision: Precision) -> Callable[[], float]:
        step = precision.compile(self.workload.model, self.workload.loss_fn, optimizer)
        return lambda: float(step(self.workload.inputs, self.workload.targets).item())

    def _eager(self, optimizer: Any, precision: Precision) -> Callable[[], float]:
        loop = TrainingLoop(self.workload, optimizer, precision)
        return lambda: loop.step().item()


@dataclass(slots=True)
class Measured:
    """Times and losses of one way, over all rounds."""

    name: str
    times_s: list[float]
    losses: list[float]
    peak_bytes: int | None = None
    """Peak of a step; unknown for a captured one, whose replay does not call the allocator."""
    parameters: int = 0
    """Of the layers that are FP8 at O3."""

    @property
    def median_ms(self) -> float:
        """The median over all rounds."""
        return 1e3 * statistics.median(self.times_s)


def measure_simple(way: Way, sizes: Sizes, into: Measured) -> None:
    """Train STEPS steps and read every loss; the first three steps are not timed."""
    training = SimpleTraining(way, sizes)
    losses: list[float] = []

    def after_step() -> None:
        if len(losses) == 3 and sizes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(sizes.device)

    timing = time_calls(
        lambda: losses.append(training.step()),
        calls=STEPS - 3,
        warmup_calls=3,
        device=sizes.device,
        after_call=after_step,
    )
    into.times_s += timing.times_s
    into.losses = losses
    if sizes.device.type == "cuda" and not way.graph:
        into.peak_bytes = torch.cuda.max_memory_allocated(sizes.device)
    into.parameters = training.parameters


def run_simple(report: Report, sizes: Sizes) -> None:
    """Speed, losses and memory of O3 against O2, stock and float32, in rounds over all of them."""
    float32 = Way("stock", "float32", "float32")
    table = {way: Measured(way.name, [], []) for way in (float32, *ways(sizes))}
    measure_simple(float32, sizes, table[float32])
    for number in range(1 if sizes.is_small else ROUNDS):
        for way, measured in table.items():
            if way is not float32:
                report.attempt(f"{way.name}, round {number + 1}", partial(measure_simple, way, sizes, measured))
                release_memory(sizes.device)
    done = {way: measured for way, measured in table.items() if measured.times_s}
    rows = [_simple_row(way, done, float32) for way in done]
    report.table(
        f"SimpleNet, SGD, {STEPS} steps, the loss read in each",
        ["way", "ms", "x stock", "x O2", "loss", "- float32", "fall / float32's", "GiB", "bytes a parameter over O2"],
        [
            [
                row["name"], f"{row['median_ms']:.3f}", _number(row["over_stock"]), _number(row["over_o2"]),
                f"{row['loss']:.6f}", f"{row['loss_minus_float32']:+.1e}", f"{row['fall_ratio']:.4f}",
                _number(row["peak_bytes"] and row["peak_bytes"] / 2**30), _number(row["bytes_over_o2"]),
            ]
            for row in rows
        ],
    )  # fmt: skip
    report.found["rows"] = rows
    _simple_goals(report, rows, sizes)
    report.found["kernel_shares"] = {
        dtype: report.attempt(f"kernels, {dtype}", partial(kernel_shares, report, Way("mezzo", "O3", dtype), sizes))
        for dtype in ("bfloat16", "float16")
    }


def _simple_row(way: Way, done: dict[Way, Measured], float32: Way) -> dict[str, Any]:
    mine, exact = done[way], done[float32]
    stock = [done[w].median_ms for w in done if w.by == "stock" and w.dtype == way.dtype]
    o2 = done.get(Way("mezzo", "O2", way.dtype, way.graph and "captured"))
    is_o3 = way.level == "O3"
    return {
        **asdict(way),
        "name": way.name,
        "median_ms": mine.median_ms,
        "times_s": mine.times_s,
        "over_stock": min(stock) / mine.median_ms if way.by == "mezzo" and stock else None,
        "over_o2": o2.median_ms / mine.median_ms if is_o3 and o2 else None,
        "first_loss": mine.losses[0],
        "loss": mine.losses[-1],
        "loss_minus_float32": mine.losses[-1] - exact.losses[-1],
        "fall_ratio": (mine.losses[0] - mine.losses[-1]) / (exact.losses[0] - exact.losses[-1]),
        "peak_bytes": mine.peak_bytes,
        "bytes_over_o2": _bytes_over(mine, o2) if is_o3 and o2 else None,
    }


def _bytes_over(mine: Measured, other: Measured) -> float | None:
    if mine.peak_bytes is None or other.peak_bytes is None:
        return None
    return (mine.peak_bytes - other.peak_bytes) / mine.parameters


def _simple_goals(report: Report, rows: list[dict[str, Any]], sizes: Sizes) -> None:
    o3 = [row for row in rows if row["level"] == "O3"]
    report.goal("the loss is within 2e-2 of float32", (abs(row["loss_minus_float32"]) <= 2e-2 for row in o3))
    report.goal("the loss falls within 10 % as in float32", (abs(row["fall_ratio"] - 1) <= 0.1 for row in o3))
    if sizes.is_small:
        return  # emulation has neither speed nor memory to gain
    for dtype in ("bfloat16", "float16"):
        best = sorted((row for row in o3 if row["dtype"] == dtype), key=lambda row: row["median_ms"])[:1]
        name = best[0]["name"] if best else dtype
        report.goal(f"at least 1.9 times the best stock run: {name}", ((row["over_stock"] or 0) >= 1.9 for row in best))
        report.goal(f"at least 1.3 times our O2: {name}", ((row["over_o2"] or 0) >= 1.3 for row in best))
    more = [row["bytes_over_o2"] for row in o3 if row["bytes_over_o2"] is not None]
    report.goal("at most 2 bytes a parameter over O2", (value <= 2 for value in more))


def kernel_shares(report: Report, way: Way, sizes: Sizes) -> dict[str, float]:
    """Return the share of the device's time that kinds of kernels have in an eager step, and name the longest kernels."""
    training = SimpleTraining(way, sizes)
    for _ in range(3):
        training.step()
    on_gpu = sizes.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        for _ in range(3):
            training.step()
        synchronize(sizes.device)
    times: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if on_gpu and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.device_time_total
        elif not on_gpu:
            times[event.name] += event.self_cpu_time_total
    total = sum(times.values())
    shares: dict[str, float] = defaultdict(float)
    for name, spent in times.items():
        kind = next((kind for kind, parts in KERNELS.items() if any(part in name.lower() for part in parts)), "other")
        shares[kind] += spent / total
    report.table(
        f"{way.name}: {total / 3e3:.3f} ms of kernels a step",
        ["kind", "share"],
        [[kind, f"{share:.1%}"] for kind, share in sorted(shares.items(), key=lambda item: -item[1])],
    )
    longest = sorted(times.items(), key=lambda item: -item[1])[:12]
    report.table(
        "the longest", ["ms a step", "kernel"], [[f"{spent / 3e3:.3f}", name[:110]] for name, spent in longest]
    )
    report.found.setdefault("longest_kernels_ms", {})[way.dtype] = {name: spent / 3e3 for name, spent in longest}
    return dict(shares)


# --- transformer: the loss curve within the spread of seeds, and tokens a second


def transformer_options(sizes: Sizes, level: str, seed: int, graph: str = "capture") -> argparse.Namespace:
    arguments = ["--level", level, "--seed", str(seed), "--graph", graph, "--device", str(sizes.device)]
    if not sizes.is_small:
        arguments += ["--size", "100m"]
    else:
        arguments += ["--emulate", "--steps", "24", "--batch-size", "2", "--context", "16", "--width", "16"]
        arguments += ["--layers", "1", "--lr", "0.01"]
    return transformer.parse(arguments)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each SMOOTHED steps in a row."""
    return [statistics.fmean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]


def judge_curves(o2: Sequence[Sequence[float]], o3: Sequence[float]) -> dict[str, float | bool]:
    """Return how far the curve of O3 is from that of O2 with the same seed (the first), and how far seeds are apart.

    Both are differences of smoothed losses. The largest difference must not be above the largest spread of seeds, and the last
    one (the mean of the last steps) not above the spread at the end.
    """
    curves, curve = [smoothed(losses) for losses in o2], smoothed(o3)
    spread = [max(at) - min(at) for at in zip(*curves, strict=True)]
    apart = [abs(mine - other) for mine, other in zip(curve, curves[0], strict=True)]
    return {
        "largest_difference": max(apart),
        "largest_spread": max(spread),
        "median_difference": statistics.median(apart),
        "median_spread": statistics.median(spread),
        "last_difference": apart[-1],
        "last_spread": spread[-1],
        "is_within": max(apart) <= max(spread) and apart[-1] <= spread[-1],
    }


def run_transformer(report: Report, sizes: Sizes) -> None:
    """Train at O2 with three seeds and at O3 with the first, then time steps in turns."""
    plan = [("O2", SEEDS[0]), ("O3", SEEDS[0]), *(("O2", seed) for seed in SEEDS[1:])]
    losses: dict[tuple[str, int], list[float]] = {}
    for level, seed in plan:
        options = transformer_options(sizes, level, seed)
        result = report.attempt(f"{level}, seed {seed}", partial(transformer.train, options, say=lambda line: None))
        release_memory(sizes.device)
        if result is not None:
            losses[level, seed] = result["losses"]
            print(f"  {level}, seed {seed}: loss {statistics.fmean(result['losses'][-SMOOTHED:]):.4f}", flush=True)
    report.found["losses"] = {f"{level}, seed {seed}": values for (level, seed), values in losses.items()}
    if len(losses) == len(plan):
        verdict = judge_curves([losses["O2", seed] for seed in SEEDS], losses["O3", SEEDS[0]])
        report.found["verdict"] = verdict
        report.table(
            f"loss curves, smoothed over {SMOOTHED} steps",
            ["", "O3 against O2, same seed", "spread of O2 over seeds"],
            [
                [which, *(f"{verdict[f'{which}_{what}']:.4f}" for what in ("difference", "spread"))]
                for which in ("largest", "median", "last")
            ],
        )
        report.goal("the curve of O3 lies within the spread of O2 over seeds", [bool(verdict["is_within"])])
    tokens_per_s(report, sizes)


def tokens_per_s(report: Report, sizes: Sizes) -> None:
    """Time the steps of all ways in turns, so that a change of the clocks affects all of them."""
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "O2 captured": lambda: our_steps(sizes, "O2", "capture"),
        "O3 captured": lambda: our_steps(sizes, "O3", "capture"),
    }
    if not sizes.is_small:
        makers["stock bfloat16, torch.compile"] = lambda: stock_steps(sizes, None)
        makers["O3 compiled"] = lambda: our_steps(sizes, "O3", "compile")
        makers["O2 compiled"] = lambda: our_steps(sizes, "O2", "compile")
        makers["stock bfloat16, torch.compile reduce-overhead"] = lambda: stock_steps(sizes, "reduce-overhead")
    steps: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        made = report.attempt(f"tokens/s of {name}", partial(warmed_up, make))
        if made is not None:
            steps[name] = made
    options = transformer_options(sizes, "O2", 0)
    rounds, calls = (2, 2) if sizes.is_small else (5, 20)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for name in itertools.chain.from_iterable(steps for _ in range(rounds)):
        synchronize(sizes.device)
        begun = time.perf_counter()
        for _ in range(calls):
            steps[name]()
        synchronize(sizes.device)
        rates[name].append(calls * options.batch_size * options.context / (time.perf_counter() - begun))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    report.found["tokens_per_s"] = rates
    base = medians.get("O2 captured")
    report.table(
        "tokens a second",
        ["way", "median", "spread", "x O2 captured"],
        [
            [name, f"{value:,.0f}", f"{max(rates[name]) - min(rates[name]):,.0f}", _number(base and value / base)]
            for name, value in medians.items()
        ],
    )


def warmed_up(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    step = make()
    for _ in range(3):
        step()
    return step


def our_steps(sizes: Sizes, level: str, graph: str) -> Callable[[], object]:
    options = transformer_options(sizes, level, 0, graph)
    model, optimizer = transformer.make_model(options)
    step = transformer.make_step(model, optimizer, options)
    data = transformer.batches(transformer.read_text(options.device), options.batch_size, options.context, 0)
    return lambda: step(*next(data))


def stock_steps(sizes: Sizes, mode: str | None) -> Callable[[], object]:
    options = transformer_options(sizes, "fp32", 0)
    model, _ = transformer.make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, mode=mode)
    data = transformer.batches(transformer.read_text(options.device), options.batch_size, options.context, 0)

    def step() -> object:
        text, following = next(data)
        with torch.autocast(sizes.device.type, dtype=torch.bfloat16):
            loss = transformer.loss_of(compiled(text), following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), transformer.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


# --- shapes: from which sizes on FP8 is faster


def run_shapes(report: Report, sizes: Sizes) -> None:
    """Time a layer's forward and backward in half and in FP8: as a CUDA graph, and eager."""
    widths = (16, 32) if sizes.is_small else (256, 512, 1024, 2048, 4096, 8192)
    all_rows = (16, 32) if sizes.is_small else (256, 512, 1024, 2048, 4096, 8192, 16384)
    cells: list[dict[str, Any]] = []
    for widening in (1, 4):
        for width, rows in itertools.product(widths, all_rows):
            outputs = widening * width
            cell = report.attempt(
                f"{rows} rows, {width} -> {outputs}", partial(time_shape, sizes, rows, width, outputs)
            )
            cells += [] if cell is None else [cell]
        for how in ("graph", "eager"):
            grid = {(c["rows"], c["inputs"]): c for c in cells if c["outputs"] == widening * c["inputs"]}
            report.table(
                f"time in bfloat16 / time in FP8, n -> {widening} n, {how}",
                ["rows", *(f"n {width}" for width in widths)],
                [[rows, *(_ratio_of(grid.get((rows, width)), how) for width in widths)] for rows in all_rows],
            )
    report.found["cells"] = cells
    report.found["wins"] = {how: wins_from(cells, how) for how in ("graph", "eager")}
    for how, pairs in report.found["wins"].items():
        text = ", ".join(f"{rows} rows: min_width {width:g}" for rows, width in pairs) or "nowhere"
        print(f"  FP8 is faster from there on ({how}): {text}")


def _ratio_of(cell: dict[str, Any] | None, how: str) -> str:
    return "-" if cell is None else f"{cell[f'half_{how}_s'] / cell[f'fp8_{how}_s']:.2f}"


def wins_from(cells: Sequence[dict[str, Any]], how: str) -> list[tuple[int, float]]:
    """Return, for each number of rows, the narrowest layer from which on FP8 wins with as many rows or more.

    Its width is that of `Fp8Recipe.min_width`.
    """

    def width_of(cell: dict[str, Any]) -> float:
        return float(cell["inputs"] * cell["outputs"] / (cell["inputs"] + cell["outputs"]))

    pairs = []
    for rows in sorted({cell["rows"] for cell in cells}):
        tall = [cell for cell in cells if cell["rows"] >= rows]
        lost = [width_of(cell) for cell in tall if cell[f"half_{how}_s"] <= cell[f"fp8_{how}_s"]]
        won = [width for cell in tall if (width := width_of(cell)) > max(lost, default=0.0)]
        if won:
            pairs.append((rows, min(won)))
    return pairs


def time_shape(sizes: Sizes, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": sizes.device, "dtype": torch.bfloat16}
    weight, bias = nn.Parameter(torch.randn(outputs, inputs, **half)), nn.Parameter(torch.randn(outputs, **half))
    attach_master(weight, weight.detach().float())  # so that its FP8 copies are kept
    x, grad = torch.randn(rows, inputs, **half, requires_grad=True), torch.randn(rows, outputs, **half)
    recipe = recipe_to_text(sizes.fp8(fast_accumulation="forward"))
    layers: dict[str, Callable[[], Tensor]] = {
        "half": lambda: nn.functional.linear(x, weight, bias),
        "fp8": lambda: fp8_linear(x, weight, bias, recipe),
    }
    found: dict[str, Any] = {"rows": rows, "inputs": inputs, "outputs": outputs}
    for name, layer in layers.items():

        def both(layer: Callable[[], Tensor] = layer) -> None:
            torch.autograd.grad(layer(), (x, weight, bias), grad)

        found[f"{name}_eager_s"] = _seconds(both, sizes.device)
        with _as_graph(both, sizes.device) as replay:
            found[f"{name}_graph_s"] = _seconds(replay, sizes.device)
    return found


@contextmanager
def _as_graph(call: Callable[[], None], device: torch.device) -> Iterator[Callable[[], None]]:
    """Return a function that replays the kernels of a call; on a CPU the call itself."""
    if device.type != "cuda":
        yield call
        return
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        call()
    yield graph.replay
    del graph
    gc.collect()


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the best mean of a few calls in a row: the device's time where the host is ahead, the host's elsewhere."""
    calls = 10 if device.type == "cuda" else 1

    def several() -> None:
        for _ in range(calls):
            call()

    timing = time_calls(several, calls=3, warmup_calls=1, device=device)
    return min(timing.times_s) / calls


# --- emulation and checks: the same numbers


def run_emulation(report: Report, sizes: Sizes) -> None:
    """Compare the three products of a layer by hardware with their emulation, on the same operands."""
    rows, inputs, outputs = (32, 64, 48) if sizes.is_small else (2048, 4096, 1024)
    found = []
    for half, by_row, fmt, fast in itertools.product(
        (torch.bfloat16, torch.float16), (False, True), ("e5m2", "e4m3"), (False, True)
    ):
        label = f"{str(half)[6:]}, {'row' if by_row else 'tensor'}, {fmt}, {'fast' if fast else 'exact sums'}"
        call = partial(compare_products, sizes, rows, inputs, outputs, half, by_row, fmt, fast)
        for product, numbers in (report.attempt(label, call) or {}).items():
            found.append({"case": label, "product": product, **numbers})
    report.found["products"] = found
    report.table(
        f"hardware against emulation, {rows} rows, {inputs} -> {outputs}",
        ["case", "product", "units of the result", "share of the products", "of FP8's own error"],
        [
            [
                row["case"],
                row["product"],
                f"{row['units']:.2f}",
                f"{row['of_products']:.1e}",
                f"{row['of_fp8_error']:.1e}",
            ]
            for row in found
        ],
    )
    report.goal(
        f"no difference is above the result's rounding and {SUM_ERROR:.1e} of the products",
        (row["is_within"] for row in found),
    )


def compare_products(
    sizes: Sizes, rows: int, inputs: int, outputs: int, half: torch.dtype, by_row: bool, fmt: str, fast: bool
) -> dict[str, dict[str, Any]]:
    """Return, for each product, the largest difference in units of the result's rounding and as a share of the products."""
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, device=sizes.device, dtype=half)
    weight = torch.randn(outputs, inputs, device=sizes.device, dtype=half) * inputs**-0.5
    grad = torch.randn(rows, outputs, device=sizes.device, dtype=half) * 1e-3
    left, right = make_operand(x, by_row=by_row), make_operand(weight, by_row=by_row)
    of_grad = make_operand(grad, FORMATS[fmt], by_row=by_row)
    products = {
        "output": ((left.values, left.inverse), (right.values, right.inverse), x, weight.t()),
        "input gradient": (
            (of_grad.values, of_grad.inverse), (right.transposed, right.transposed_inverse), grad, weight
        ),
        "weight gradient": (
            (of_grad.transposed, of_grad.transposed_inverse), (left.transposed, left.transposed_inverse), grad.t(), x
        ),
    }  # fmt: skip
    eps = torch.finfo(torch.bfloat16 if by_row else half).eps  # by row the product is made in bfloat16
    found = {}
    for name, (a, b, exact_a, exact_b) in products.items():
        made = multiply(*a, *b, half, fast=fast, emulate=sizes.is_small).float()
        emulated = multiply(*a, *b, half, emulate=True).float()
        size = multiply(a[0].float().abs(), a[1], b[0].float().abs(), b[1], torch.float32, emulate=True)
        apart = (made - emulated).abs()
        fp8_error = emulated - exact_a.float() @ exact_b.float()
        found[name] = {
            "units": (apart / (eps * emulated.abs().clamp(min=float(emulated.abs().mean())))).max().item(),
            "of_products": (apart / size).max().item(),
            "of_fp8_error": (apart.norm() / fp8_error.norm()).item(),
            "is_within": bool((apart <= 2 * eps * emulated.abs() + SUM_ERROR * size).all()),
        }
    return found


def run_checks(report: Report, sizes: Sizes) -> None:
    """Compare the operands that Triton's kernels make with torch's, bit for bit, odd sizes and odd numbers included."""
    shapes = [(1, 1), (5, 7), (16, 16), (63, 65), (64, 128), (129, 1000)]
    shapes += [] if sizes.is_small else [(2048, 8192), (4096, 4097)]
    rows = []
    for (height, width), dtype, half in itertools.product(shapes, (E4M3, E5M2), (torch.bfloat16, torch.float16)):
        label = f"{height} x {width}, {str(dtype)[6:]} from {str(half)[6:]}"
        is_equal = report.attempt(label, partial(operands_agree, sizes.device, height, width, dtype, half))
        if is_equal is not None:
            rows.append([label, "equal" if is_equal else "DIFFERENT"])
    by = "Triton against torch" if uses_triton(sizes.device) else "torch against itself: Triton does not run here"
    report.table(f"operands, {by}", ["matrix", ""], rows)
    report.found["operands"] = dict(rows)
    report.goal("operands are equal bit for bit", (row[1] == "equal" for row in rows))


def operands_agree(device: torch.device, height: int, width: int, dtype: torch.dtype, half: torch.dtype) -> bool:
    torch.manual_seed(height * width)
    x = torch.randn(height, width, device=device, dtype=torch.float32)
    x = (x * torch.logspace(-6, 3, width, device=device)).to(half)  # from what vanishes to what is largest
    x.view(-1)[:: max(3, x.numel() // 7)] = 0.0
    for headroom in (1.0, 2.0):
        ours = make_operand(x, dtype, sums=torch.float32, headroom=headroom)
        with step_tier("fused"):
            stock = make_operand(x, dtype, sums=torch.float32, headroom=headroom)
        pairs = [(ours.values, stock.values), (ours.transposed, stock.transposed)]
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            return False
        if not torch.equal(ours.inverse, stock.inverse):
            return False
        assert ours.column_sums is not None
        assert stock.column_sums is not None
        # Sums of float32 in another order: some units of the sum of absolute values.
        if not bool(((ours.column_sums - stock.column_sums).abs() <= 1e-5 * x.float().abs().sum(0)).all()):
            return False
    return True


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


PARTS: dict[str, Callable[[Report, Sizes], None]] = {
    "checks": run_checks,
    "emulation": run_emulation,
    "simple": run_simple,
    "shapes": run_shapes,
    "transformer": run_transformer,
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes, FP8 emulated")
    parser.add_argument("--budget", type=float, help="seconds of all parts together")
    parser.add_argument("--json", type=Path, help="where to write everything")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(PARTS)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU here; try --small")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = Sizes(device, options.small)
    share = 1.0 if options.budget is None else options.budget / sum(BUDGET_S[part] for part in parts)
    found: dict[str, Any] = {"is_small": options.small, "parts": {}}
    for part in (part for part in PARTS if part in parts):
        print(f"\n=== {part}", flush=True)
        report = Report(part, share * BUDGET_S[part])
        report.attempt(part, partial(PARTS[part], report, sizes))
        found["parts"][part] = report.to_dict()
        found["machine"] = asdict(read_machine(device))
        if options.json is not None:  # after each part: a run that is cut short leaves what it has
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


if __name__ == "__main__":
    sys.exit(any(part["errors"] for part in main()["parts"].values()))
