"""FP8 operands are multiplied, with the keywords that mezzo.fp8 uses."""

import inspect

import pytest
import torch

from mezzo._torch.products import scaled_mm


def test_the_function_is_there() -> None:
    assert scaled_mm is not None, "torch._scaled_mm is gone: level O3 refuses to run on GPUs"
    assert not inspect.isclass(scaled_mm)


@pytest.mark.gpu
def test_one_scale_for_each_operand() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 products")
    a = torch.full((16, 32), 2.0, device="cuda").to(torch.float8_e4m3fn)
    b = torch.full((16, 32), 0.5, device="cuda").to(torch.float8_e4m3fn)
    one = torch.tensor(2.0, device="cuda"), torch.tensor(0.5, device="cuda")
    options = {"bias": None, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    made = scaled_mm(a, b.t(), scale_a=one[0], scale_b=one[1], **options)
    assert made.dtype is torch.bfloat16
    assert (made == 32).all()


def test_the_keywords_are_those_of_the_operator() -> None:
    names = {argument.name for argument in torch.ops.aten._scaled_mm.default._schema.arguments}
    assert {"scale_a", "scale_b", "bias", "out_dtype", "use_fast_accum"} <= names
