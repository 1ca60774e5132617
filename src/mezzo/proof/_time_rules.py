"""Advice about where a step's time goes: hardware, AMP itself, launches, casts, products, data."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from mezzo.amp import has_half_units
from mezzo.amp.hardware import AMP_SINCE
from mezzo.dtypes import HALF_NAMES
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination
from mezzo.proof._inputs import arguments_of
from mezzo.proof._products import is_product
from mezzo.record import FP8, CastRow
from mezzo.report import time_text

IDLE_SHARE = 0.1
"""Share of a step without a kernel from which it is called launch-bound."""
CAST_SHARE = 0.05
"""Share of the kernels' time in casts from which they are worth a line."""
LEAST_GAIN = 1.02
"""What is predicted to bring less is not advised."""
LOADER_BATCHES = 12


def hardware(seen: Examination) -> Iterator[Advice]:
    """AMP on a GPU that is too old for it, or on a CPU that has no units for it."""
    if seen.capability is not None and seen.capability < AMP_SINCE[seen.dtype]:
        needed = ".".join(map(str, AMP_SINCE[seen.dtype]))
        has = ".".join(map(str, seen.capability))
        yield Advice(
            kind="hardware",
            where=str(seen.device),
            seen=f"compute capability {has}; AMP in {seen.setup.dtype} needs {needed}",
            todo="turn AMP off here: it runs in float32, or slower"
            + ("" if needed == "7.0" else "; float16 needs 7.0"),
        )
    if not seen.is_cuda and not has_half_units(seen.dtype):
        yield Advice(
            kind="hardware",
            where=str(seen.device),
            seen=f"this CPU has no {seen.setup.dtype} units: products compute inside in float32, with casts around them",
            todo="turn AMP off where speed on this CPU matters; keep it to test what a GPU will do",
        )


def amp_itself(seen: Examination) -> Iterator[Advice]:
    """Whether AMP does anything, and whether it is faster than float32."""
    gain = seen.full.step_s / seen.amp.step_s
    products = [kernel for kernel in seen.amp.stats.kernels if is_product(kernel.op)]
    half_s = sum(kernel.time_us for kernel in products if kernel.dtype in (*HALF_NAMES, FP8))
    if products and not half_s and (seen.is_cuda or has_half_units(seen.dtype)):
        yield Advice(
            kind="amp-idle",
            where="",
            seen="no matrix product or convolution ran in half",
            todo="is the forward inside auto_cast, and is the model's input floating? amp.explain(model) says what is decided",
        )
    elif gain < LEAST_GAIN:
        yield Advice(
            kind="amp-off",
            where="",
            seen=f"a step takes {time_text(seen.amp.step_s)} in AMP and {time_text(seen.full.step_s)} in float32",
            todo="as it is now, turn AMP off; what is advised besides may turn it round",
            gain=max(1.0, 1 / gain),
        )


def amdahl(seen: Examination) -> Iterator[Advice]:
    """How much AMP can bring at all: products are what half precision makes much faster."""
    full = seen.full
    if not full.busy_s:
        return
    share = full.product_s / full.busy_s
    if not seen.is_cuda:
        what = f"products take {share:.0%} of the operators' time in float32: what half units would speed up"
        yield Advice(kind="amdahl", where="", seen=what, todo="")
        return
    speedup = seen.product_speedup
    bound = 1 / (1 - share + share / speedup)
    tensor_cores = seen.amp.stats.tensor_core_share
    on_cores = "" if tensor_cores is None else f"; in AMP {tensor_cores:.0%} of the kernels' time is on Tensor Cores"
    yield Advice(
        kind="amdahl",
        where="",
        seen=f"products take {share:.0%} of the kernels' time in float32, a large one is {speedup:.1f}x as fast in half here: "
        f"{bound:.2f}x at most from them; the rest moves half the bytes, at best 2x{on_cores}",
        todo="",
    )


def launches(seen: Examination) -> Iterator[Advice]:
    """A GPU that waits for the host: graph mode."""
    amp = seen.amp
    if not seen.is_cuda or amp.idle_share < IDLE_SHARE:
        return
    yield Advice(
        kind="launch-bound",
        where="",
        seen=f"no kernel runs for {amp.idle_share:.0%} of a step: {amp.num_launches} kernels take {time_text(amp.busy_s)}, "
        f"the host needs {time_text(amp.host_s)} to launch them",
        todo="capture the step: mezzo.static.capture_step (the same kernels) or compile_step (fewer); or a larger batch",
        gain=seen.gain_captured(amp),
        setup=replace(seen.setup, is_captured=True) if takes_tensors(seen) else None,
    )


def takes_tensors(seen: Examination) -> bool:
    """Whether a step of the task can be captured from here: tensors in, by place, and one tensor to compare with."""
    args, kwargs = arguments_of(seen.task.model, seen.task.inputs)
    return not kwargs and all(isinstance(value, torch.Tensor) for value in (*args, seen.task.targets))


def casts(seen: Examination) -> Iterator[Advice]:
    """Time in casts; weights that are cast in every step."""
    amp = seen.amp
    if not amp.busy_s or amp.cast_s / amp.busy_s < CAST_SHARE:
        return
    top = amp.stats.casts[0]
    is_plain = seen.setup.level == "O1" and not seen.setup.is_decorated
    seen_text = (
        f"{sum(row.calls for row in amp.stats.casts)} casts take {amp.cast_s / amp.busy_s:.0%} of the kernels' time; "
        f"the largest is {top.source} to {top.target} in {_part(top)}"
    )
    setup = replace(seen.setup, is_decorated=True)
    gain = seen.gain_of(seen.observe(setup, "AMP step with half weights")) if is_plain else 1.0
    if is_plain and gain >= LEAST_GAIN:
        todo = f"amp.decorate(model, optimizer, level={seen.setup.level!r}): no step casts a weight any more"
        yield Advice(kind="casts", where="", seen=seen_text, todo=todo, gain=gain, setup=setup)
    else:
        todo = "keep what flows between layers in half: see the leaks" + (
            ", and level O2" if seen.setup.level == "O1" else ""
        )
        yield Advice(
            kind="casts", where="", seen=seen_text, todo=todo, gain=seen.gain_without(amp.cast_s), is_bound=True
        )


def _part(row: CastRow) -> str:
    return "the optimizer's step" if row.phase == "optimizer" else f"{row.module or 'the model itself'} ({row.phase})"


def loader(seen: Examination) -> Iterator[Advice]:
    """Batches that come more slowly than they are trained on."""
    if seen.loader is None:
        return
    batch_s = time_batches(seen)
    if batch_s is None:
        yield Advice(
            kind="loader", where=type(seen.loader).__name__, seen="it gives too few batches to be timed", todo=""
        )
        return
    step_s = seen.amp.step_s
    if batch_s <= step_s:
        return
    workers = getattr(seen.loader, "num_workers", None)
    yield Advice(
        kind="loader",
        where=type(seen.loader).__name__,
        seen=f"a batch takes {time_text(batch_s)} to load and {time_text(step_s)} to train on: the device waits "
        f"{1 - step_s / batch_s:.0%} of the time" + ("" if workers is None else f", with {workers} workers"),
        todo="more workers (num_workers), persistent_workers=True, smaller or decoded images, uint8 normalised on the device; "
        "no precision helps before",
        gain=batch_s / step_s,
    )


def time_batches(seen: Examination) -> float | None:
    """Return the mean time between two batches; None if there are too few.

    Those that workers have ready, or work on, before anybody asks are left out. Random numbers are given back.
    """
    workers = getattr(seen.loader, "num_workers", 0) or 0
    ahead = 1 + workers * (getattr(seen.loader, "prefetch_factor", None) or 2)
    wanted = LOADER_BATCHES if not workers else workers * -(-LOADER_BATCHES // workers)
    with torch.random.fork_rng(devices=[]):
        batches = iter(seen.loader)
        if len(list(islice(batches, ahead))) < ahead:
            return None
        begin, count = time.perf_counter(), 0
        for count, _ in enumerate(islice(batches, wanted), start=1):
            seen.progress("loader", count, wanted)
        return (time.perf_counter() - begin) / count if count else None
