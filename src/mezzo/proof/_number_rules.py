"""Advice about numbers: float32 that leaks between half layers, and a loss scale that does not come to rest."""

import math
from collections.abc import Iterator

from mezzo.amp import is_operator_name
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination
from mezzo.proof._time_rules import LEAST_GAIN
from mezzo.record import EXCLUDED, Leak

MOST_LEAKS = 12
PASSES = 4
"""How often the additional bytes of a leak are moved: written and read, in the forward and in the backward."""
FEW_SKIPS = 3
"""Skipped steps that finding the scale may take."""

# Whose result, rounded to half, is what the half operator behind them would round it to anyway, but for one more rounding.
_MAY_BE_WHITE = frozenset({"add", "sub", "mul", "cat", "stack"})


def leaks(seen: Examination) -> Iterator[Advice]:
    """float32 results between half operators."""
    found = seen.amp.stats.leaks
    for leak in found[:MOST_LEAKS]:
        gain = seen.gain_without(PASSES * leak.extra_bytes / seen.copy_bandwidth) if seen.is_cuda else None
        if gain is not None and gain < LEAST_GAIN and leak is not found[0]:
            continue  # the largest is named in any case
        white = leak.op if _may_be_white(leak) else None
        names = tuple(sorted({*seen.setup.changes.custom_white_list, white})) if white else ()
        yield Advice(
            kind="leak",
            where=_place(leak),
            seen=f"{leak.op} gives float32 ({leak.reason})"
            + (f", and so do, behind it, {', '.join(leak.followers)}" if leak.followers else "")
            + f", until {', '.join(leak.fed[:3])} takes it in half: {leak.extra_bytes:,} bytes more in the forward",
            todo=_remedy(leak, white),
            gain=gain,
            setup=seen.with_changes(custom_white_list=names) if white and is_operator_name(white) else None,
        )


def _may_be_white(leak: Leak) -> bool:
    return leak.op in _MAY_BE_WHITE and leak.reason.startswith(("promoted", "gray"))


def _place(leak: Leak) -> str:
    return " at ".join(part for part in (leak.module, leak.line) if part)


def _remedy(leak: Leak, white: str | None) -> str:
    if white:
        return f"custom_white_list=[{white!r}]: it computes in half, as what follows does"
    if leak.reason == "cast by the model's own code":
        return "leave the cast out, or cast back (.to(x.dtype)) right behind the operator that needs float32"
    if leak.reason == EXCLUDED:
        return (
            "this layer is excluded from AMP: cast its result to half (.half()) where what follows need not be float32"
        )
    if "black" in leak.reason:
        return (
            f"{leak.op} is black-listed: fine for its own result; cast it to half before anything else computes on it"
        )
    return "cast the result to half, or the float32 input that promotes it"


def loss_scale(seen: Examination) -> Iterator[Advice]:
    """A loss scale that goes on skipping steps."""
    bad = next((number for number, loss in enumerate(seen.amp.losses, start=1) if not math.isfinite(loss)), None)
    if bad is not None:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"the loss is not finite, first at step {bad} of those measured here; in float32 it is "
            + ("fine" if all(map(math.isfinite, seen.full.losses)) else "not finite either"),
            todo="amp.debugging.tensor_checker names the kernel and the cause; times may be those of NaN",
        )
        return
    if seen.setup.dtype != "float16":
        return
    skipped, scale, source = seen.amp.num_skipped, seen.amp.last_scale, "the steps measured here"
    if seen.scaler is not None and seen.scaler.is_enable():
        skipped, scale, source = seen.scaler.skipped_steps, float(seen.scaler.get_scale()), "the given GradScaler"
        if scale >= seen.scaler.get_init_loss_scaling():
            return  # it has come back to where it began: skips now and then are how it grows
    if scale <= 1.0 and skipped:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"{source}: {skipped} steps skipped, the scale is at its floor ({scale:g})",
            todo="gradients overflow at any scale: amp.debugging.tensor_checker names the kernel, mezzo bisect what must "
            "stay in float32; or bfloat16",
        )
    elif skipped > FEW_SKIPS:
        yield Advice(
            kind="loss-scale",
            where="",
            seen=f"{source}: {skipped} steps skipped, the scale is {scale:g} now",
            todo=f"GradScaler(init_loss_scaling={scale:g}) begins where it fits; if it goes on, "
            "amp.debugging.collect_ranges() shows which gradients are too large",
        )
