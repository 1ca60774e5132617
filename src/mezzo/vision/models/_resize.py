"""Bilinear resizing whose gradient on CUDA is two matrix products.

The backward kernel of CUDA adds the gradient of each output to four inputs with atomic operations. When logits are
enlarged eight times, about a hundred outputs compete for one input: 22 of the 34 ms of a PP-LiteSeg step on an H200
(benchmarks/resize_h200_202611.md). Resizing is linear and separable, y = A x B', so its gradient is A' g B.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo._torch.script import tracing_state

_only_torch = False


@contextmanager
def torch_operators_only() -> Iterator[None]:
    """Inside, networks compute with torch's own operators only: the stock side of a benchmark.

    The switch holds for the whole process. It decides in the forward pass; gradients of a forward pass follow it.
    """
    global _only_torch
    before, _only_torch = _only_torch, True
    try:
        yield
    finally:
        _only_torch = before


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` at the height and width of `like`: bilinear, with half-pixel centres."""
    height, width = like.shape[-2:]
    if not _only_torch and x.is_cuda and _is_recorded(x) and height * width > x.shape[-2] * x.shape[-1]:
        enlarged: Tensor = _Enlarged.apply(x, height, width)  # type: ignore[no-untyped-call]
        return enlarged
    return _bilinear(x, height, width)


def _bilinear(x: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def _is_recorded(x: Tensor) -> bool:
    """Return whether autograd will run the backward pass; compilers and exporters generate their own."""
    is_traced = torch.compiler.is_compiling() or tracing_state() is not None
    return x.requires_grad and torch.is_grad_enabled() and not is_traced


class _Enlarged(torch.autograd.Function):
    """Enlarging, with the gradient as matrix products: without atomics, so bit-exact in every run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, height: int, width: int) -> Tensor:
        return _bilinear(x, height, width)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.dtype, ctx.size = inputs[0].dtype, inputs[0].shape[-2:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch.autocast(grads[0].device.type, enabled=False):
            return resize_gradient(grads[0], *ctx.size).to(ctx.dtype), None, None


def resize_gradient(grad: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient of the input (n, c, height, width) of a bilinear resize from the gradient of its output.

    The memory layout, contiguous or channels last, is kept. Products accumulate in float32 in every dtype.
    """
    vertical = _weights(height, grad.shape[-2], grad.device, grad.dtype).t()
    horizontal = _weights(width, grad.shape[-1], grad.device, grad.dtype)
    if grad.is_contiguous(memory_format=torch.channels_last) and not grad.is_contiguous():
        rows = vertical @ grad.permute(0, 2, 3, 1).flatten(2)  # n, height, width of the output x channels
        pixels = horizontal.t() @ rows.reshape(*rows.shape[:2], grad.shape[-1], grad.shape[1])
        return pixels.permute(0, 3, 1, 2)
    return vertical @ (grad @ horizontal)


def _weights(size: int, resized: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix (resized, size) of a resize along one axis."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A matrix created during capture has no values before the first replay, so it must not be cached.
        return _compute_weights(size, resized, device, dtype)
    return _cached_weights(size, resized, device, dtype)


def _compute_weights(size: int, resized: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        identity = torch.eye(size, device=device)[None, None]
        return _bilinear(identity, resized, size)[0, 0].to(dtype)


_cached_weights = functools.lru_cache(maxsize=256)(_compute_weights)
