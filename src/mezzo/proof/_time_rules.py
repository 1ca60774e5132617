"""Advice about the time of a step: hardware, AMP itself, launches, casts, products, data."""

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
from mezzo.proof._products import is_product
from mezzo.record import FP8, CastRow
from mezzo.report import time_text

IDLE_SHARE = 0.1
"""A step is launch-bound if no kernel runs for at least this share of it."""
CAST_SHARE = 0.05
"""Report casts from this share of the kernels' time on."""
LEAST_GAIN = 1.02
"""Smallest predicted speed-up that is advised."""
LOADER_BATCHES = 12


def hardware(exam: Examination) -> Iterator[Advice]:
    """Advise on a GPU that is too old for AMP, or a CPU without half units."""
    if exam.capability is not None and exam.capability < AMP_SINCE[exam.dtype]:
        needed = ".".join(map(str, AMP_SINCE[exam.dtype]))
        has = ".".join(map(str, exam.capability))
        yield Advice(
            kind="hardware",
            where=str(exam.device),
            seen=f"compute capability {has}; AMP in {exam.setup.dtype} needs {needed}",
            todo="turn AMP off on this GPU: it would run in float32, or slower"
            + ("" if needed == "7.0" else "; float16 needs 7.0"),
        )
    if not exam.is_cuda and not has_half_units(exam.dtype):
        yield Advice(
            kind="hardware",
            where=str(exam.device),
            seen=f"this CPU has no {exam.setup.dtype} units: products compute in float32 with casts around them",
            todo="turn AMP off if speed on this CPU matters; keep it to test what a GPU will do",
        )


def amp_itself(exam: Examination) -> Iterator[Advice]:
    """Advise if AMP has no effect, or is not faster than float32."""
    gain = exam.full.step_s / exam.amp.step_s
    products = [kernel for kernel in exam.amp.stats.kernels if is_product(kernel.op)]
    half_s = sum(kernel.time_us for kernel in products if kernel.dtype in (*HALF_NAMES, FP8))
    if products and not half_s and (exam.is_cuda or has_half_units(exam.dtype)):
        yield Advice(
            kind="amp-idle",
            where="",
            seen="no matrix product or convolution ran in half",
            todo="run the forward pass inside auto_cast with floating-point inputs; amp.explain(model) shows the decisions",
        )
    elif gain < LEAST_GAIN:
        is_unsteady = exam.amp.timing.is_unsteady or exam.full.timing.is_unsteady
        again = "measure again on an idle machine, because these times are not steady; then " if is_unsteady else ""
        yield Advice(
            kind="amp-off",
            where="",
            seen=f"a step takes {time_text(exam.amp.step_s)} in AMP and {time_text(exam.full.step_s)} in float32",
            todo=f"{again}turn AMP off, unless the other advice makes it faster",
            gain=max(1.0, 1 / gain),
        )


def amdahl(exam: Examination) -> Iterator[Advice]:
    """Bound the gain of AMP: only products become much faster in half."""
    full = exam.full
    if not full.busy_s:
        return
    share = full.product_s / full.busy_s
    if not exam.is_cuda:
        what = f"products take {share:.0%} of the operators' time in float32; only they would be faster with half units"
        yield Advice(kind="amdahl", where="", seen=what, todo="")
        return
    speedup = exam.product_speedup
    bound = 1 / (1 - share + share / speedup)
    tensor_cores = exam.amp.stats.tensor_core_share
    on_cores = "" if tensor_cores is None else f"; in AMP {tensor_cores:.0%} of the kernels' time is on Tensor Cores"
    yield Advice(
        kind="amdahl",
        where="",
        seen=f"products take {share:.0%} of the kernels' time in float32, and a large one is {speedup:.1f}x as fast in "
        f"half here: at most {bound:.2f}x from products; the rest moves half the bytes, at most 2x{on_cores}",
        todo="",
    )


def launches(exam: Examination) -> Iterator[Advice]:
    """Advise graph mode if the GPU waits for the host."""
    amp = exam.amp
    if not exam.is_cuda or amp.idle_share < IDLE_SHARE:
        return
    yield Advice(
        kind="launch-bound",
        where="",
        seen=f"no kernel runs for {amp.idle_share:.0%} of a step: {amp.num_launches} kernels take {time_text(amp.busy_s)}, "
        f"the host needs {time_text(amp.host_s)} to launch them",
        todo="capture the step with mezzo.static.capture_step (same kernels) or compile_step (fewer), or use a larger batch",
        gain=exam.gain_captured(amp),
        setup=replace(exam.setup, is_captured=True) if exam.workload.can_be_captured else None,
    )


def casts(exam: Examination) -> Iterator[Advice]:
    """Advise on the time of casts, and on weights that are cast in every step."""
    amp = exam.amp
    if not amp.busy_s or amp.cast_s / amp.busy_s < CAST_SHARE:
        return
    top = amp.stats.casts[0]
    is_plain = exam.setup.level == "O1" and not exam.setup.is_decorated
    seen_text = (
        f"{sum(row.calls for row in amp.stats.casts)} casts take {amp.cast_s / amp.busy_s:.0%} of the kernels' time; "
        f"the largest is {top.source} to {top.target} in {_part(top)}"
    )
    setup = replace(exam.setup, is_decorated=True)
    gain = exam.gain_of(exam.observe(setup, "AMP step with half weights")) if is_plain else 1.0
    if is_plain and gain >= LEAST_GAIN:
        todo = f"amp.decorate(model, optimizer, level={exam.setup.level!r}) avoids casting the weights in every step"
        yield Advice(kind="casts", where="", seen=seen_text, todo=todo, gain=gain, setup=setup)
    else:
        todo = _cast_remedy(exam)
        yield Advice(
            kind="casts", where="", seen=seen_text, todo=todo, gain=exam.gain_without(amp.cast_s), is_bound=True
        )


def _cast_remedy(exam: Examination) -> str:
    if not exam.is_cuda and not has_half_units(exam.dtype):
        return "none here: on this CPU, products compute in float32 between casts; a GPU has no such casts"
    remedy = (
        "keep activations in half (see the advice 'leak')"
        if exam.amp.stats.leaks
        else "compile the step (precision.compile), which fuses casts with other operators"
    )
    return remedy + (", or use level O2" if exam.setup.level == "O1" else "")


def _part(row: CastRow) -> str:
    return "the optimizer's step" if row.phase == "optimizer" else f"{row.module or 'the model itself'} ({row.phase})"


def loader(exam: Examination) -> Iterator[Advice]:
    """Advise on a loader that is slower than the training step."""
    if exam.loader is None:
        return
    batch_s = time_batches(exam)
    if batch_s is None:
        yield Advice(kind="loader", where=type(exam.loader).__name__, seen="too few batches to time it", todo="")
        return
    step_s = exam.amp.step_s
    if batch_s <= step_s:
        return
    workers = getattr(exam.loader, "num_workers", None)
    yield Advice(
        kind="loader",
        where=type(exam.loader).__name__,
        seen=f"loading a batch takes {time_text(batch_s)}, training on it {time_text(step_s)}: the device waits "
        f"{1 - step_s / batch_s:.0%} of the time" + ("" if workers is None else f", with {workers} workers"),
        todo="fix this first: more workers (num_workers), persistent_workers=True, smaller or decoded images, or uint8 "
        "images that are normalised on the device",
        gain=batch_s / step_s,
    )


def time_batches(exam: Examination) -> float | None:
    """Return the mean time between two batches, or None if there are too few.

    Batches that workers prefetched are not counted. The random state of torch is restored.
    """
    workers = getattr(exam.loader, "num_workers", 0) or 0
    ahead = 1 + workers * (getattr(exam.loader, "prefetch_factor", None) or 2)
    wanted = LOADER_BATCHES if not workers else workers * -(-LOADER_BATCHES // workers)
    with torch.random.fork_rng(devices=[]):
        batches = iter(exam.loader)
        if len(list(islice(batches, ahead))) < ahead:
            return None
        begin, count = time.perf_counter(), 0
        for count, _ in enumerate(islice(batches, wanted), start=1):
            exam.progress("loader", count, wanted)
        return (time.perf_counter() - begin) / count if count else None
