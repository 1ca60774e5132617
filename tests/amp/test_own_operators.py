"""Operators of mezzo follow the lists of the operators of torch that they stand for."""

import pytest
import torch

from mezzo.amp import auto_cast
from mezzo.kernels import enlarge_bilinear

HALF = torch.bfloat16


def enlarged(dtype: torch.dtype, **region) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the result and of the input's gradient."""
    x = torch.randn(1, 2, 3, 4).to(dtype).requires_grad_()
    with auto_cast(dtype="bfloat16", **region):
        result = enlarge_bilinear(x, 6, 8)
        expected = torch.nn.functional.interpolate(x, size=(6, 8), mode="bilinear")
    assert result.dtype is expected.dtype
    result.sum().backward()
    assert x.grad is not None
    return result.dtype, x.grad.dtype


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_the_result_has_the_dtype_of_torchs_operator(dtype: torch.dtype, level: str) -> None:
    assert enlarged(dtype, level=level)[1] is dtype


def test_a_black_list_makes_it_float32() -> None:
    assert enlarged(HALF, level="O2") == (HALF, HALF)
    assert enlarged(HALF, level="O2", custom_black_list=["upsample_bilinear2d"]) == (torch.float32, HALF)


def test_a_white_list_makes_it_half() -> None:
    assert enlarged(torch.float32, level="O1", custom_white_list=["upsample_bilinear2d"]) == (HALF, torch.float32)


def test_the_black_list_holds_in_a_captured_graph() -> None:
    from mezzo.static import to_static

    @to_static(backend="aot_eager")
    def grow(x: torch.Tensor) -> torch.Tensor:
        return enlarge_bilinear(x, 6, 8)

    x = torch.randn(1, 2, 3, 4).to(HALF).requires_grad_()
    with auto_cast(level="O2", dtype="bfloat16", custom_black_list=["upsample_bilinear2d"]):
        assert grow(x).dtype is torch.float32
    with auto_cast(level="O2", dtype="bfloat16"):
        assert grow(x).dtype is HALF
