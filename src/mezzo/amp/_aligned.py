"""A linear layer with an odd number of outputs, computed in products of aligned sizes.

Rows of half matrices must begin at multiples of 16 bytes, or cuBLAS falls back to old, slow kernels
(`cutlass_75 ... align1`). The vocabulary of GPT-2 has 50257 words: its three products took 30 of the
82 ms of an eager step (16x1024 tokens) on an H200. Inductor pads such products itself; eager mode
does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.amp._carried import is_plainly_called
from mezzo.amp._state import current_policy
from mezzo.dtypes import HALF_DTYPES

_ALIGNMENT = 8
"""Half elements in 16 bytes."""
LEAST_OUTPUTS = 1024
"""Smaller layers stay: their products are short, and padding copies their weights. Not measured."""


def is_odd(layer: nn.Module) -> bool:
    """Whether a layer is a plain `nn.Linear` that padding makes faster.

    Only odd numbers are measured; cuBLAS has better kernels for even ones.
    """
    return type(layer) is nn.Linear and layer.out_features >= LEAST_OUTPUTS and layer.out_features % 2 == 1


class AlignedLinear(nn.Linear):
    """`nn.Linear` whose half products on CUDA have an aligned number of outputs.

    The result is a view of the first columns, so its rows lie apart. Everywhere else it is `nn.Linear`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`."""
        if torch.compiler.is_compiling() or not x.is_cuda or not self._is_half(x):
            return super().forward(x)
        result: Tensor = _AlignedProduct.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result

    def _is_half(self, x: Tensor) -> bool:
        """Whether it is a product of half tensors, outside of torch.func, forward AD and jit traces."""
        dtype, policy = self.weight.dtype, current_policy()
        if dtype not in HALF_DTYPES or x.dtype is not dtype or (self.bias is not None and self.bias.dtype is not dtype):
            return False
        if not is_plainly_called([x, *self.parameters()]):
            return False
        return policy is None or (policy.fp8 is None and policy.decide("linear", (dtype, dtype)).dtype is dtype)


def align_in_place(layer: nn.Module) -> None:
    """Make an odd `nn.Linear` a `AlignedLinear`; parameters, hooks and state stay."""
    layer.__class__ = AlignedLinear


class _AlignedProduct(torch.autograd.Function):
    """`x @ weight.T + bias` with zero rows below the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            wide_bias = None if bias is None else _padded(bias.unsqueeze(1)).squeeze(1)
            wide = F.linear(x, _padded(weight), wide_bias)
            # Not a slice: autograd forbids in-place operations on a view that a Function returns.
            return wide.new_empty(0).set_(wide.untyped_storage(), 0, (*wide.shape[:-1], len(weight)), wide.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        outputs = len(weight)
        with torch.autocast(x.device.type, enabled=False):
            grad = _padded(grads[0].reshape(-1, outputs).t()).t()
            x_grad = (grad @ _padded(weight)).view(x.shape) if ctx.needs_input_grad[0] else None
            weight_grad = (grad.t() @ x.reshape(-1, x.shape[-1]))[:outputs] if ctx.needs_input_grad[1] else None
            bias_grad = grad.sum(0)[:outputs] if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad


def _padded(matrix: Tensor) -> Tensor:
    """Return a matrix with zero rows up to the next aligned number; its memory runs as the matrix's does."""
    rows, columns = matrix.shape
    aligned = -(-rows // _ALIGNMENT) * _ALIGNMENT
    is_transposed = matrix.stride(0) == 1  # then the padding lies at the end of each line of memory
    padded = matrix.new_empty((columns, aligned)).t() if is_transposed else matrix.new_empty((aligned, columns))
    padded[:rows] = matrix
    padded[rows:] = 0
    return padded
