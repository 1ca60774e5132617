"""Advice about FP8: what level O3 would bring; at O3, what is FP8, what is not and why, and what it does to the numbers."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from mezzo.amp import Fp8Recipe, first_and_last, is_excluded
from mezzo.fp8 import LEAST_CAPABILITY, MULTIPLE, recipe_for, why_no_fp8
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination
from mezzo.proof._products import Product, is_product
from mezzo.proof._shape_rules import round_up
from mezzo.proof._time_rules import LEAST_GAIN
from mezzo.record import Fp8Row

MOST_LAYERS = 8
"""Layers that are told one by one."""
TO_ZERO_SHARE = 0.05
"""Share of a tensor's numbers rounded to zero from which it is worth a line."""
CUT_SHARE = 0.001
"""Share of a tensor's numbers cut off from which it is worth a line."""
BYTES_OF_INPUT = 6
"""Moved a number to convert an operand: two readings of half, two FP8 copies written."""


def fp8(seen: Examination) -> Iterator[Advice]:
    """What FP8 would bring, or does."""
    if seen.setup.level == "O3":
        yield from _emulated(seen)
        yield from _shares(seen)
        yield from _in_half(seen)
        yield from _lost(seen)
    elif seen.capability is not None and seen.capability >= LEAST_CAPABILITY:
        yield from _would_bring(seen)


def _recipe(seen: Examination) -> Fp8Recipe:
    return recipe_for(seen.device, seen.setup.fp8)


def _layers(seen: Examination) -> list[Product]:
    """Return the products of linear layers in the forward, each place once."""
    found = (each for each in seen.amp.products if not each.is_convolution and each.op not in ("bmm", "baddbmm", "mv"))
    return list({(each.module, each.line, each.inputs, each.outputs): each for each in found}.values())


def _emulated(seen: Examination) -> Iterator[Advice]:
    reason = why_no_fp8(seen.device)
    if reason is not None or _recipe(seen).emulate:
        yield Advice(
            kind="hardware",
            where=str(seen.device),
            seen=f"{reason or 'emulation was asked for'}: products in FP8 were emulated, and slow",
            todo="look at the numbers here, and at the time on a GPU of compute capability 8.9 or above",
        )


def _shares(seen: Examination) -> Iterator[Advice]:
    layers = _layers(seen)
    in_fp8 = [each for each in layers if each.is_fp8]
    amp = seen.amp
    share = amp.fp8_s / amp.product_s if amp.product_s else 0.0
    converting = (
        f"; converting operands takes {amp.convert_s / amp.busy_s:.0%} of the kernels' time" if amp.convert_s else ""
    )
    text = f"{len(in_fp8)} of {len(layers)} products of linear layers are FP8, {share:.0%} of the products' time{converting}"
    yield Advice(kind="fp8", where="", seen=text, todo="" if in_fp8 else "level O2: nothing here is FP8")


def _in_half(seen: Examination) -> Iterator[Advice]:
    """Layers that could not be FP8, those with the most arithmetic first."""
    halves = sorted(
        (each for each in _layers(seen) if not each.is_fp8), key=lambda each: -each.rows * each.inputs * each.outputs
    )
    for product in halves[:MOST_LAYERS]:
        reason, todo = _reason(seen, product)
        yield Advice(kind="fp8", where=product.module or product.line, seen=f"in half: {reason}", todo=todo)
    if len(halves) > MOST_LAYERS:
        rest = ", ".join(each.module or each.line for each in halves[MOST_LAYERS:][:MOST_LAYERS])
        yield Advice(kind="fp8", where="", seen=f"{len(halves) - MOST_LAYERS} more are in half: {rest}", todo="")


def _reason(seen: Examination, product: Product) -> tuple[str, str]:
    reason = _recipe(seen).why_half(product.rows, product.inputs, product.outputs)
    if reason is None:
        return "it is kept so", "half_layers=() of decorate makes the first and the last layer FP8 too"
    if "multiple" not in reason:
        return reason, ""
    wanted = [round_up(size, MULTIPLE) for size in (product.rows, product.inputs, product.outputs)]
    return reason, f"{wanted[0]} rows, {wanted[1]} -> {wanted[2]} features, what is added being zero"


def _lost(seen: Examination) -> Iterator[Advice]:
    """Tensors of which much is rounded to zero, or cut off."""
    for row in seen.fp8_rows:
        if row.to_zero_share >= TO_ZERO_SHARE or row.cut_share >= CUT_SHARE:
            yield Advice(
                kind="fp8-numbers",
                where=f"{row.module}, {row.role}",
                seen=f"{row.to_zero_share:.1%} of it is rounded to zero in {row.format}, {row.cut_share:.2%} is cut off",
                todo=_remedy(row),
            )


def _remedy(row: Fp8Row) -> str:
    if row.cut_share >= CUT_SHARE:
        return "scaling='current', or a longer history; a weight that grows so fast wants a smaller learning rate"
    other = " or gradient='e5m2'" if row.role == "gradient" and row.format == "e4m3" else ""
    return f"granularity='row'{other}, or amp.keep_in_half(model, {row.module!r}) if mezzo bisect --level O3 names it"


def _would_bring(seen: Examination) -> Iterator[Advice]:
    """What O3 would bring, from the time of the products that could be FP8 and the bytes that converting moves."""
    recipe = Fp8Recipe()
    kept = {id(layer) for layer in (*first_and_last(seen.task.model), *filter(is_excluded, seen.task.model.modules()))}
    could = [
        each
        for each in _layers(seen)
        if recipe.why_half(each.rows, each.inputs, each.outputs) is None and id(_layer(seen, each)) not in kept
    ]
    if not could:
        return
    places = {each.module for each in could}
    product_s = seen.amp.time_of(lambda kernel: is_product(kernel.op) and kernel.module in places)
    moved = sum(BYTES_OF_INPUT * each.rows * (each.inputs + each.outputs) for each in could)
    saved_s = product_s * (1 - 1 / seen.fp8_speedup) - moved / seen.copy_bandwidth
    gain = seen.gain_without(saved_s)
    if gain < LEAST_GAIN:
        return
    yield Advice(
        kind="fp8",
        where="",
        seen=f"{len(could)} products of linear layers take {product_s / seen.amp.busy_s:.0%} of the kernels' time and could be "
        f"FP8, in which a large one is {seen.fp8_speedup:.2f}x as fast here",
        todo="level O3, if the numbers allow it: mezzo compare --levels O2,O3 and mezzo bisect --level O3",
        gain=gain,
        setup=replace(seen.setup, level="O3", is_decorated=True),
    )


def _layer(seen: Examination, product: Product) -> nn.Module | None:
    try:
        return seen.layer(product.module)
    except AttributeError:  # the task's model is not the outermost module that was called
        return None
