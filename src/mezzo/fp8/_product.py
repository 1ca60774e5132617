"""One product of FP8 operands, on Tensor Cores or emulated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mezzo._torch.products import scaled_mm
from mezzo.fp8._recipe import Fp8Recipe

LEAST_CAPABILITY = (8, 9)
"""Ada and Hopper are the first GPUs that multiply FP8."""


@functools.cache
def _of_gpu(index: int) -> str | None:
    if scaled_mm is None:
        return "this torch has no FP8 products"
    if torch.version.hip is not None:
        return "FP8 products on ROCm GPUs use other formats, which mezzo does not support"
    capability = torch.cuda.get_device_capability(index)
    if capability >= LEAST_CAPABILITY:
        return None
    name = torch.cuda.get_device_name(index)
    return f"{name} has compute capability {capability[0]}.{capability[1]}, FP8 products need 8.9 or above"


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device cannot multiply FP8 numbers; None if it can.

    >>> why_no_fp8(torch.device("cpu"))
    'a CPU has no FP8 products'
    """
    if device.type != "cuda":
        return f"a {device.type.upper()} has no FP8 products"
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


def refuse_without_fp8(device: torch.device, emulate: bool) -> None:
    """Raise RuntimeError if a device has no FP8 products, unless they are emulated."""
    if emulate:
        return
    reason = why_no_fp8(device)
    if reason is not None:
        raise RuntimeError(
            f"level O3: {reason}; use level O2, or fp8={{'emulate': True}}, which computes the same numbers in "
            "float32 and shows whether FP8 would hurt"
        )


def recipe_for(device: torch.device, fp8: Fp8Recipe | Mapping[str, Any] | None = None) -> Fp8Recipe:
    """Return a recipe, emulated on a device without FP8 products.

    For questions about numbers, not speed.

    Args:
        device: Where the products are computed.
        fp8: A recipe or its settings; None: the default.

    >>> recipe_for(torch.device("cpu"), {"gradient": "e4m3"}).emulate
    True
    """
    recipe = Fp8Recipe.of(fp8)
    return recipe if why_no_fp8(device) is None else replace(recipe, emulate=True)


def multiply(
    a: Tensor,
    a_inverse: Tensor,
    b: Tensor,
    b_inverse: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    emulate: bool = False,
) -> Tensor:
    """Return a [rows, inner] times the transpose of b [columns, inner], in a half dtype.

    Args:
        a: FP8, contiguous.
        a_inverse: Undoes its scale: one number, or [rows, 1].
        b: FP8, contiguous.
        b_inverse: One number, or [columns, 1].
        dtype: Of the result.
        bias: Added before the result is rounded.
        fast: Let Tensor Cores accumulate with fewer bits.
        emulate: Multiply in float32, where the products of FP8 numbers are exact.
    """
    by_row = a_inverse.dim() > 0
    if emulate:
        exact = (a.float() @ b.float().t()) * (a_inverse * b_inverse.t() if by_row else a_inverse * b_inverse)
        return (exact if bias is None else exact + bias.float()).to(dtype)
    bias = None if bias is None else bias.contiguous()  # the kernel ignores its strides
    if not by_row:
        return _scaled_mm(a, b.t(), a_inverse, b_inverse, dtype, bias, fast)
    # Before cuBLAS 12.9 CUTLASS computes these, only in bfloat16.
    product = _scaled_mm(a, b.t(), a_inverse, b_inverse.t(), torch.bfloat16, None, fast)
    return (product if bias is None else product + bias).to(dtype)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    assert scaled_mm is not None, "refuse_without_fp8 was called before"
    try:
        result = scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    except RuntimeError as error:
        if "NOT_SUPPORTED" not in str(error):
            raise
        how = "a scale for each row" if scale_a.dim() else "one scale"
        raise RuntimeError(
            f"level O3: this GPU's libraries do not multiply {a.dtype} by {b.dtype} with {how} into {dtype}; try another "
            "granularity, gradient or dtype, or use level O2"
        ) from error
    return result
