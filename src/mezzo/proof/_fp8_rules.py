"""Advice about FP8: the gain of level O3; at O3, which products are FP8, why others are not, and the numbers."""

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
"""Layers that get an advice of their own."""
TO_ZERO_SHARE = 0.05
"""Report tensors of which at least this share is rounded to zero."""
CUT_SHARE = 0.001
"""Report tensors of which at least this share is clipped."""
BYTES_OF_INPUT = 6
"""Bytes moved per number to convert an operand: two reads of half, two writes of FP8 copies."""


def fp8(exam: Examination) -> Iterator[Advice]:
    """Advise on FP8."""
    if exam.setup.level == "O3":
        yield from _emulated(exam)
        yield from _shares(exam)
        yield from _in_half(exam)
        yield from _lost(exam)
    elif exam.capability is not None and exam.capability >= LEAST_CAPABILITY:
        yield from _would_bring(exam)


def _recipe(exam: Examination) -> Fp8Recipe:
    return recipe_for(exam.device, exam.setup.fp8)


def _layers(exam: Examination) -> list[Product]:
    """Return the products of linear layers in the forward pass, without duplicates."""
    found = (each for each in exam.amp.products if not each.is_convolution and each.op not in ("bmm", "baddbmm", "mv"))
    return list({(each.module, each.line, each.inputs, each.outputs): each for each in found}.values())


def _emulated(exam: Examination) -> Iterator[Advice]:
    reason = why_no_fp8(exam.device)
    if reason is not None or _recipe(exam).emulate:
        yield Advice(
            kind="hardware",
            where=str(exam.device),
            seen=f"{reason or 'the recipe asks for emulation'}: FP8 products were emulated, which is slow",
            todo="judge only the numbers here; measure the time on a GPU of compute capability 8.9 or above",
        )


def _shares(exam: Examination) -> Iterator[Advice]:
    layers = _layers(exam)
    in_fp8 = [each for each in layers if each.is_fp8]
    amp = exam.amp
    share = amp.fp8_s / amp.product_s if amp.product_s else 0.0
    converting = (
        f"; converting operands takes {amp.convert_s / amp.busy_s:.0%} of the kernels' time" if amp.convert_s else ""
    )
    text = f"{len(in_fp8)} of {len(layers)} products of linear layers are FP8, {share:.0%} of the products' time{converting}"
    yield Advice(kind="fp8", where="", seen=text, todo="" if in_fp8 else "use level O2: nothing is FP8 here")


def _in_half(exam: Examination) -> Iterator[Advice]:
    """Advise on layers that are not FP8, those with the most arithmetic first."""
    halves = sorted(
        (each for each in _layers(exam) if not each.is_fp8), key=lambda each: -each.rows * each.inputs * each.outputs
    )
    for product in halves[:MOST_LAYERS]:
        reason, todo = _reason(exam, product)
        yield Advice(kind="fp8", where=product.module or product.line, seen=f"in half: {reason}", todo=todo)
    if len(halves) > MOST_LAYERS:
        rest = ", ".join(each.module or each.line for each in halves[MOST_LAYERS:][:MOST_LAYERS])
        yield Advice(kind="fp8", where="", seen=f"{len(halves) - MOST_LAYERS} more are in half: {rest}", todo="")


def _reason(exam: Examination, product: Product) -> tuple[str, str]:
    reason = _recipe(exam).why_half(product.rows, product.inputs, product.outputs)
    if reason is None:
        return "it is kept in half", "decorate(half_layers=()) makes the first and the last layer FP8 too"
    if "multiple" not in reason:
        return reason, ""
    wanted = [round_up(size, MULTIPLE) for size in (product.rows, product.inputs, product.outputs)]
    return reason, f"pad with zeros to {wanted[0]} rows, {wanted[1]} -> {wanted[2]} features"


def _lost(exam: Examination) -> Iterator[Advice]:
    """Advise on tensors that FP8 rounds to zero or clips."""
    for row in exam.fp8_rows:
        if row.to_zero_share >= TO_ZERO_SHARE or row.cut_share >= CUT_SHARE:
            yield Advice(
                kind="fp8-numbers",
                where=f"{row.module}, {row.role}",
                seen=f"{row.format} rounds {row.to_zero_share:.1%} of it to zero and clips {row.cut_share:.2%}",
                todo=_remedy(row),
            )


def _remedy(row: Fp8Row) -> str:
    if row.cut_share >= CUT_SHARE:
        return "use scaling='current' or a longer history; for a weight, use a smaller learning rate"
    other = " or gradient='e5m2'" if row.role == "gradient" and row.format == "e4m3" else ""
    return (
        f"use granularity='row'{other}, or amp.keep_in_half(model, {row.module!r}) if mezzo bisect --level O3 names it"
    )


def _would_bring(exam: Examination) -> Iterator[Advice]:
    """Predict the gain of O3 from the time of the products that could be FP8 and the bytes that conversion moves."""
    recipe = Fp8Recipe()
    kept = {
        id(layer)
        for layer in (*first_and_last(exam.workload.model), *filter(is_excluded, exam.workload.model.modules()))
    }
    could = [
        each
        for each in _layers(exam)
        if recipe.why_half(each.rows, each.inputs, each.outputs) is None and id(_layer(exam, each)) not in kept
    ]
    if not could:
        return
    places = {each.module for each in could}
    product_s = exam.amp.time_of(lambda kernel: is_product(kernel.op) and kernel.module in places)
    moved = sum(BYTES_OF_INPUT * each.rows * (each.inputs + each.outputs) for each in could)
    saved_s = product_s * (1 - 1 / exam.fp8_speedup) - moved / exam.copy_bandwidth
    gain = exam.gain_without(saved_s)
    if gain < LEAST_GAIN:
        return
    yield Advice(
        kind="fp8",
        where="",
        seen=f"{len(could)} products of linear layers take {product_s / exam.amp.busy_s:.0%} of the kernels' time and could be "
        f"FP8; a large FP8 product is {exam.fp8_speedup:.2f}x as fast as half here",
        todo="try level O3; check the numbers with mezzo compare --levels O2,O3 and mezzo bisect --level O3",
        gain=gain,
        setup=replace(exam.setup, level="O3", is_decorated=True),
    )


def _layer(exam: Examination, product: Product) -> nn.Module | None:
    try:
        return exam.layer(product.module)
    except AttributeError:  # the workload's model is not the outermost module that was called
        return None
