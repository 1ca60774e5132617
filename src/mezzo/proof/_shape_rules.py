"""Advice about sizes and layouts: what Tensor Cores read in whole pieces, and channels-last images."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mezzo.amp import auto_cast
from mezzo.amp.debugging import collect_operator_stats
from mezzo.proof._advice import Advice
from mezzo.proof._changes import can_be_padded, channels_of, pad_layer
from mezzo.proof._examination import Examination
from mezzo.proof._products import Product
from mezzo.proof._time_rules import LEAST_GAIN

IMAGE_CHANNELS = 3
PADDED_IMAGE_CHANNELS = 4
TRIED_LAYERS = 12
"""Layers whose padded form is timed, those with the most arithmetic first."""


def multiple_for(capability: tuple[int, int] | None) -> int:
    """Return what sizes should be a multiple of in half: 8, from the A100 on 16.

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


def layout(seen: Examination) -> Iterator[Advice]:
    """Convolutions over NCHW images: Tensor Cores want the channels last."""
    wrong = [product for product in seen.amp.products if product.is_channels_last is False]
    if not wrong:
        return
    setup = seen.with_changes(channels_last=True)
    gain = seen.gain_of(setup, "AMP step channels-last")
    if gain < LEAST_GAIN:
        return
    yield Advice(
        kind="layout",
        where=wrong[0].module,
        seen=f"{len(wrong)} convolutions read NCHW images, the first is {wrong[0].module or wrong[0].line}; their kernels "
        f"take {1e3 * seen.amp.busy_s:.3g} ms, channels-last {1e3 * seen.measure(setup, '').busy_s:.3g} ms",
        todo="model.to(memory_format=torch.channels_last), and images in that layout",
        gain=gain,
        setup=setup,
    )


def shapes(seen: Examination) -> Iterator[Advice]:
    """Products with sizes that are no multiple of 8, or 16: which layer, and what to pad to."""
    multiple = multiple_for(seen.capability)
    odd = sorted(
        (p for p in _each_layer_once(seen) if _wanted(p, multiple) != _has(p)),
        key=lambda p: -p.rows * p.inputs * p.outputs,
    )
    for number, product in enumerate(odd):
        seen.progress("odd shapes", number + 1, len(odd))
        yield from _advise_shape(seen, product, multiple, is_timed=seen.is_cuda and number < TRIED_LAYERS)


def _each_layer_once(seen: Examination) -> list[Product]:
    products = {
        (product.module, product.api_op, product.line): product for product in seen.amp.products if product.groups == 1
    }
    return list(products.values())


def _has(product: Product) -> tuple[int, int]:
    return product.inputs, product.outputs


def _wanted(product: Product, multiple: int) -> tuple[int, int]:
    """Return inputs and outputs that Tensor Cores like; an image's three channels become four."""
    is_image = product.is_convolution and product.inputs <= IMAGE_CHANNELS
    return PADDED_IMAGE_CHANNELS if is_image else round_up(product.inputs, multiple), round_up(
        product.outputs, multiple
    )


def _advise_shape(seen: Examination, product: Product, multiple: int, *, is_timed: bool) -> Iterator[Advice]:
    wanted = _wanted(product, multiple)
    what = "channels" if product.is_convolution else "features"
    is_odd = any(size % 8 for size in _has(product))
    where = product.module or product.line
    layer = _padded_candidate(seen, product)
    setup, gain = None, None
    if layer is not None and is_timed:
        saved_s = _time_layer(seen, layer, product) - _time_layer(seen, layer, product, padded_to=wanted)
        gain = seen.gain_without(saved_s)
        if gain >= LEAST_GAIN:
            padding = (*seen.setup.changes.pad_channels, (product.module, *wanted))
            setup = seen.with_changes(pad_channels=padding)
    if gain is not None and gain < LEAST_GAIN and not is_odd:
        return  # a multiple of 8 that would not gain from 16
    helps = "; padded it is not faster here" if gain is not None and gain < LEAST_GAIN else ""
    yield Advice(
        kind="shape",
        where=where,
        seen=f"{product.api_op or product.op} with {product.inputs} -> {product.outputs} {what}: "
        f"no multiple of {multiple}{helps}",
        todo=f"{wanted[0]} -> {wanted[1]} {what}, what is added being zero" if not helps else "",
        gain=gain if gain is None or gain >= LEAST_GAIN else None,
        setup=setup,
    )


def _padded_candidate(seen: Examination, product: Product) -> nn.Module | None:
    """Return the layer that a product belongs to, if its channels can be padded from outside."""
    try:
        layer = seen.layer(product.module)
    except AttributeError:  # the task's model is not the outermost module that was called
        return None
    return layer if can_be_padded(layer) and channels_of(layer) == _has(product) else None


def _time_layer(
    seen: Examination, layer: nn.Module, product: Product, padded_to: tuple[int, int] | None = None
) -> float:
    """Return the seconds of the kernels of one layer, forward and backward, on random numbers of the shape it got."""
    layer = copy.deepcopy(layer).to(seen.device)
    if padded_to is not None:
        pad_layer(layer, *padded_to)
    with torch.random.fork_rng(devices=[seen.device]):
        x: Tensor = torch.randn(product.input_shape, device=seen.device, dtype=seen.dtype)
    if product.is_channels_last:
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_(product.inputs > IMAGE_CHANNELS)  # nobody asks for the gradient of an image

    def run() -> None:
        with auto_cast(level=seen.setup.level, dtype=seen.setup.dtype):
            out = layer(x)
        out.backward(out.detach())

    for _ in range(3):
        run()
    with collect_operator_stats(False, kernels=True) as stats:
        run()
    return stats.kernel_time_us / 1e6


def with_padding(advices: list[Advice]) -> tuple[tuple[str, int, int], ...]:
    """Return the padding of all layers for which it is advised."""
    rows: dict[str, tuple[str, int, int]] = {}
    for advice in advices:
        if advice.kind == "shape" and advice.setup is not None:
            rows |= {row[0]: row for row in advice.setup.changes.pad_channels}
    return tuple(rows.values())
