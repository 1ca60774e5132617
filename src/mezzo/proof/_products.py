"""The matrix products and convolutions of a step: their sizes and layouts, layer by layer."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo.fp8 import FP8_LINEAR, FP8_LINEAR_BACKWARD
from mezzo.record import KernelOp, KernelRun, find_tensors

MATRIX_PRODUCTS = frozenset(
    [
        *"mm addmm bmm baddbmm mv addmv linear _addmm_activation _scaled_mm _grouped_mm _scaled_grouped_mm".split(),
        FP8_LINEAR,
    ]
)
RECURRENT_LAYERS = frozenset("_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward".split())
CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "cudnn_convolution", "convolution_backward", "mkldnn_convolution"}
)
ATTENTIONS = "_scaled_dot_product"
"""Prefix of the names of fused attention, forward and backward."""


def is_product(op: str) -> bool:
    """Return whether an operator multiplies matrices, so that it can use Tensor Cores.

    >>> is_product("addmm"), is_product("convolution_backward"), is_product("add")
    (True, True, False)
    """
    is_layer = op in CONVOLUTIONS or op in RECURRENT_LAYERS or op == FP8_LINEAR_BACKWARD
    return op in MATRIX_PRODUCTS or is_layer or op.startswith(ATTENTIONS)


@dataclass(frozen=True, slots=True)
class Product:
    """All forward products with the same sizes at one place."""

    op: str
    api_op: str
    module: str
    line: str
    input_shape: tuple[int, ...]
    inputs: int
    """K: length of the sums; channels of a convolution."""
    outputs: int
    """N: columns of the result; channels of a convolution."""
    rows: int
    """M: rows of the result; pixels of a convolution, all images together."""
    groups: int
    is_channels_last: bool | None
    """None if there are no channels."""

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution."""
        return self.op in CONVOLUTIONS

    @property
    def is_fp8(self) -> bool:
        """Whether its operands were converted to FP8."""
        return self.op == FP8_LINEAR


class ProductSink:
    """A listener of recordings that keeps the sizes of products."""

    wants_lines = True
    wants_times = False

    def __init__(self) -> None:
        self._calls: dict[Product, int] = {}
        self._lock = threading.Lock()

    def wants(self, op: KernelOp) -> bool:
        """Return whether an operator is a forward product."""
        return op.name in MATRIX_PRODUCTS or op.name in CONVOLUTIONS

    def receive(self, kernel: KernelRun) -> None:
        """Keep the sizes of a kernel."""
        if kernel.phase != "forward":
            return
        product = _convolution(kernel) if kernel.op.name in CONVOLUTIONS else _matrix_product(kernel)
        if product is not None:
            with self._lock:
                self._calls[product] = self._calls.get(product, 0) + 1

    @property
    def products(self) -> list[Product]:
        """The products in order, without duplicates."""
        with self._lock:
            return list(self._calls)


def _matrix_product(kernel: KernelRun) -> Product | None:
    matrices = [tensor for tensor in find_tensors(kernel.args) if tensor.dim() >= 2 and tensor.is_floating_point()]
    if len(matrices) < 2:
        return None
    # a summand comes before the factors, scales come after them
    a, b = matrices[:2] if "scaled" in kernel.op.name else matrices[-2:]
    inputs = a.shape[-1]
    is_layer = kernel.op.name in ("linear", FP8_LINEAR)
    rows = a.numel() // inputs if is_layer and inputs else a.shape[-2]
    outputs = b.shape[0] if is_layer else b.shape[-1]
    return _product(kernel, a, inputs, outputs, rows=rows, groups=1, is_channels_last=None)


def _convolution(kernel: KernelRun) -> Product | None:
    found = list(find_tensors(kernel.args))
    if len(found) < 2 or found[0].dim() < 3:
        return None
    image, weight = found[:2]
    arguments: tuple[Any, ...] = tuple(kernel.args)
    groups = next((value for value in reversed(arguments) if type(value) is int), 1)
    is_transposed = kernel.op.name == "convolution" and len(arguments) > 6 and arguments[6] is True
    outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
    result = next(kernel.outputs(), None)
    if result is None:  # integer tensors
        return None
    rows = result.shape[0] * math.prod(result.shape[2:])
    is_last = _is_channels_last(image) if image.dim() == 4 else None
    if is_last and image.is_contiguous():  # with one pixel or one channel both layouts are the same
        is_last = weight.is_contiguous(memory_format=torch.channels_last)
    return _product(kernel, image, image.shape[1], outputs, rows=rows, groups=groups, is_channels_last=is_last)


def _is_channels_last(image: Tensor) -> bool:
    """Return whether the channels of a pixel are adjacent; cut-off channels may leave gaps between pixels."""
    is_whole = image.is_contiguous(memory_format=torch.channels_last)
    return is_whole or (image.stride(1) == 1 and image.shape[1] > 1 and not image.is_contiguous())


def _product(
    kernel: KernelRun,
    first: Tensor,
    inputs: int,
    outputs: int,
    *,
    rows: int,
    groups: int,
    is_channels_last: bool | None,
) -> Product:
    return Product(
        op=kernel.op.name,
        api_op=kernel.api_op,
        module=kernel.module,
        line=kernel.line,
        input_shape=tuple(first.shape),
        inputs=inputs,
        outputs=outputs,
        rows=rows,
        groups=groups,
        is_channels_last=is_channels_last,
    )
