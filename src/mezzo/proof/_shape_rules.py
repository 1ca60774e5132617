"""Advice about sizes and layouts: multiples that Tensor Cores need, and channels-last images."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from mezzo.amp import auto_cast
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination
from mezzo.proof._products import Product
from mezzo.proof._time_rules import IDLE_SHARE, LEAST_GAIN
from mezzo.record import collect_operator_stats
from mezzo.report import time_text
from mezzo.trial import can_be_padded, channels_of, pad_layer

IMAGE_CHANNELS = 3
PADDED_IMAGE_CHANNELS = 4
TRIED_LAYERS = 12
"""Number of layers that are timed with padding, those with the most arithmetic first."""


def multiple_for(capability: tuple[int, int] | None) -> int:
    """Return the multiple that sizes should have in half: 8; from the A100 on 16.

    >>> multiple_for((7, 0)), multiple_for((9, 0)), multiple_for(None)
    (8, 16, 8)
    """
    return 16 if capability is not None and capability >= (8, 0) else 8


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple.

    >>> round_up(61, 8), round_up(64, 8)
    (64, 64)
    """
    return -(-size // multiple) * multiple


def layout(exam: Examination) -> Iterator[Advice]:
    """Advise on convolutions over NCHW images: Tensor Cores are faster with channels-last."""
    wrong = [product for product in exam.amp.products if product.is_channels_last is False]
    if not wrong:
        return
    setup = exam.with_changes(channels_last=True)
    after = exam.observe(setup, "AMP step channels-last")
    if exam.amp.busy_s / after.busy_s < LEAST_GAIN:
        return
    gain = exam.gain_of(after)
    yield Advice(
        kind="layout",
        where=wrong[0].module,
        seen=f"{len(wrong)} convolutions read NCHW images, the first is {wrong[0].module or wrong[0].line}; the step's kernels "
        f"take {time_text(exam.amp.busy_s)}, channels-last {time_text(after.busy_s)}"
        + (", but the host needs longer to launch them" if gain < LEAST_GAIN else ""),
        todo="use model.to(memory_format=torch.channels_last) and channels-last images"
        + ("; it helps only with a captured step" if gain < LEAST_GAIN else ""),
        gain=gain,
        setup=setup,
    )
    if exam.is_cuda and 1 - after.busy_s / exam.amp.predicted_s(after.busy_s, after.num_launches) >= IDLE_SHARE:
        yield Advice(
            kind="launch-bound",
            where="channels-last",
            seen=f"with channels-last the GPU waits for the host: {after.num_launches} kernels take {time_text(after.busy_s)}",
            todo="use channels-last and a captured step: mezzo.static.capture_step or compile_step",
            gain=exam.gain_captured(after),
            setup=replace(setup, is_captured=True) if exam.workload.can_be_captured else None,
        )


def shapes(exam: Examination) -> Iterator[Advice]:
    """Advise on products whose sizes are not a multiple of 8 (or 16): which layer, and what to pad to."""
    multiple = multiple_for(exam.capability)
    odd = [product for product in _each_layer_once(exam) if _wanted(product, multiple) != _has(product)]
    odd.sort(key=lambda p: (not _breaks_eight(p), -p.rows * p.inputs * p.outputs))
    without_gain: list[Product] = []
    for number, product in enumerate(odd):
        gain = _gain_of_padding(exam, product, multiple) if exam.is_cuda and number < TRIED_LAYERS else None
        if gain is not None and gain < LEAST_GAIN:
            without_gain.append(product)
        elif gain is not None or _breaks_eight(product):
            yield _shape(exam, product, multiple, gain)
    if without_gain:
        names = ", ".join(f"{_where(product)} ({_sizes(_has(product))})" for product in without_gain)
        seen_text = f"sizes are not a multiple of {multiple}, but padding is not faster here: {names}"
        yield Advice(kind="shape", where="", seen=seen_text, todo="")


def _each_layer_once(exam: Examination) -> list[Product]:
    """Return the products with weights, without duplicates; products of two activations cannot be padded."""
    weighted = (each for each in exam.amp.products if each.groups == 1 and each.op not in ("bmm", "baddbmm"))
    return list({(each.module, each.api_op, each.line): each for each in weighted}.values())


def _has(product: Product) -> tuple[int, int]:
    return product.inputs, product.outputs


def _breaks_eight(product: Product) -> bool:
    return any(size % 8 for size in _has(product))


def _where(product: Product) -> str:
    return product.module or product.line


def _sizes(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} -> {sizes[1]}"


def _is_of_image(product: Product) -> bool:
    return product.is_convolution and product.inputs <= IMAGE_CHANNELS


def _wanted(product: Product, multiple: int) -> tuple[int, int]:
    """Return inputs and outputs padded for Tensor Cores; the three channels of an image become four."""
    inputs = PADDED_IMAGE_CHANNELS if _is_of_image(product) else round_up(product.inputs, multiple)
    return inputs, round_up(product.outputs, multiple)


def _shape(exam: Examination, product: Product, multiple: int, gain: float | None) -> Advice:
    wanted = _wanted(product, multiple)
    what = "channels" if product.is_convolution else "features"
    enough = f" ({PADDED_IMAGE_CHANNELS} are enough for an image)" if _is_of_image(product) else ""
    padding = (*exam.setup.changes.pad_channels, (product.module, *wanted))
    return Advice(
        kind="shape",
        where=_where(product),
        seen=f"{product.api_op or product.op} with {_sizes(_has(product))} {what}: not a multiple of {multiple}",
        todo=f"pad with zeros to {_sizes(wanted)} {what}{enough}",
        gain=gain,
        setup=None if gain is None else exam.with_changes(pad_channels=padding),
    )


def _gain_of_padding(exam: Examination, product: Product, multiple: int) -> float | None:
    """Return the gain of padding, from the layer's kernels without and with it; None if the layer cannot be padded."""
    layer = _padded_candidate(exam, product)
    if layer is None:
        return None
    wanted = _wanted(product, multiple)
    return exam.gain_without(_time_layer(exam, layer, product) - _time_layer(exam, layer, product, padded_to=wanted))


def _padded_candidate(exam: Examination, product: Product) -> nn.Module | None:
    """Return the layer of a product if its channels can be padded, otherwise None."""
    try:
        layer = exam.layer(product.module)
    except AttributeError:  # the workload's model is not the outermost module that was called
        return None
    return layer if can_be_padded(layer) and channels_of(layer) == _has(product) else None


def _time_layer(
    exam: Examination, layer: nn.Module, product: Product, padded_to: tuple[int, int] | None = None
) -> float:
    """Return the seconds of a layer's kernels, forward and backward, on a random input of the recorded shape."""
    layer = copy.deepcopy(layer).to(exam.device)
    if padded_to is not None:
        pad_layer(layer, *padded_to)
    with torch.random.fork_rng(devices=[exam.device]):
        x: Tensor = torch.randn(product.input_shape, device=exam.device, dtype=exam.dtype)
    if product.is_channels_last:
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(product.inputs > IMAGE_CHANNELS)  # an image needs no gradient

    def run() -> None:
        with auto_cast(level="O2" if exam.setup.level == "O3" else exam.setup.level, dtype=exam.setup.dtype):
            out = layer(x)
        out.backward(out.detach())

    for _ in range(3):
        run()
    with collect_operator_stats(False, kernels=True) as stats:
        run()
    return stats.kernel_time_us / 1e6


def with_padding(advices: list[Advice]) -> tuple[tuple[str, int, int], ...]:
    """Return the padding of all advices."""
    rows: dict[str, tuple[str, int, int]] = {}
    for advice in advices:
        if advice.kind == "shape" and advice.setup is not None:
            rows |= {row[0]: row for row in advice.setup.changes.pad_channels}
    return tuple(rows.values())
