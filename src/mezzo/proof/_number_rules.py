"""Advice about numbers: float32 leaks between half layers, and an unstable loss scale."""

import math
from collections.abc import Iterator

from mezzo.amp import is_operator_name
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination
from mezzo.proof._time_rules import LEAST_GAIN
from mezzo.record import EXCLUDED, Leak

MOST_LEAKS = 12
PASSES = 4
"""How often the extra bytes of a leak are moved: written and read, in the forward and the backward pass."""
FEW_SKIPS = 3
"""Skipped steps that are normal while the scaler finds its scale."""

# A half operator after these rounds their result to half anyway; computing in half adds only one rounding.
_MAY_BE_WHITE = frozenset({"add", "sub", "mul", "cat", "stack"})


def leaks(exam: Examination) -> Iterator[Advice]:
    """Advise on float32 results between half operators."""
    found = exam.amp.stats.leaks
    for leak in found[:MOST_LEAKS]:
        gain = exam.gain_without(PASSES * leak.extra_bytes / exam.copy_bandwidth) if exam.is_cuda else None
        if gain is not None and gain < LEAST_GAIN and leak is not found[0]:
            continue  # always report the largest
        white = leak.op if _may_be_white(leak) else None
        names = tuple(sorted({*exam.setup.changes.custom_white_list, white})) if white else ()
        yield Advice(
            kind="leak",
            where=_place(leak),
            seen=f"{leak.op} returns float32 ({leak.reason})"
            + (f", and so do {', '.join(leak.followers)} after it" if leak.followers else "")
            + f", until {', '.join(leak.fed[:3])} casts to half: {leak.extra_bytes:,} extra bytes in the forward pass",
            todo=_remedy(leak, white),
            gain=gain,
            setup=exam.with_changes(custom_white_list=names) if white and is_operator_name(white) else None,
        )


def _may_be_white(leak: Leak) -> bool:
    return leak.op in _MAY_BE_WHITE and leak.reason.startswith(("promoted", "gray"))


def _place(leak: Leak) -> str:
    return " at ".join(part for part in (leak.module, leak.line) if part)


def _remedy(leak: Leak, white: str | None) -> str:
    if white:
        return f"custom_white_list=[{white!r}] makes it compute in half, like the operators after it"
    if leak.reason == "cast by the model's own code":
        return "remove the cast, or cast back with .to(x.dtype) right after the operator that needs float32"
    if leak.reason == EXCLUDED:
        return "the layer is excluded from AMP: cast its result with .half() unless the next operators need float32"
    if "black" in leak.reason:
        return f"{leak.op} is black-listed and needs float32 itself; cast its result to half for the next operators"
    return "cast the result to half, or the float32 input that causes the promotion"


def loss_scale(exam: Examination) -> Iterator[Advice]:
    """Advise on a loss scale that keeps skipping steps."""
    bad = next((number for number, loss in enumerate(exam.amp.losses, start=1) if not math.isfinite(loss)), None)
    if bad is not None:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"the loss is not finite from measured step {bad} on; in float32 it is "
            + ("finite" if all(map(math.isfinite, exam.full.losses)) else "not finite either"),
            todo="find the kernel and the cause with amp.debugging.tensor_checker; times with NaN may be wrong",
        )
        return
    if exam.setup.dtype != "float16":
        return
    skipped, scale, source = exam.amp.num_skipped, exam.amp.last_scale, "the measured steps"
    if exam.scaler is not None and exam.scaler.is_enable():
        skipped, scale, source = exam.scaler.skipped_steps, float(exam.scaler.get_scale()), "the given GradScaler"
        if scale >= exam.scaler.get_init_loss_scaling():
            return  # the scale recovered: occasional skips are part of its growth
    if scale <= 1.0 and skipped:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"{source}: {skipped} steps skipped, the scale is at its minimum ({scale:g})",
            todo="gradients overflow at any scale: find the kernel with amp.debugging.tensor_checker and the layers that "
            "must stay in float32 with mezzo bisect, or use bfloat16",
        )
    elif skipped > FEW_SKIPS:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"{source}: {skipped} steps skipped, the scale is now {scale:g}",
            todo=f"start with GradScaler(init_loss_scaling={scale:g}); if skips continue, "
            "amp.debugging.collect_ranges() shows which gradients are too large",
        )
