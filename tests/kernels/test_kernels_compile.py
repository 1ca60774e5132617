"""The Triton kernels of mezzo.kernels compile for a GPU: a few of their tests, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

HERE = Path(__file__).parent
FILES = [
    *(HERE / f"test_{name}.py" for name in ("kernels", "batch_norm", "enlarge", "gelu", "pixel_loss")),
    HERE.parent / "static" / "test_convolutions.py",
]
FEW = " or ".join(
    [
        "float64_rounded_once and rms_norm-shape0-1-dtype0-same",
        "float64_rounded_once and relu-True-shape0-dtype0",
        "cross_entropy_is_that_of_float64 and 8-dtype0-mean-0.1",
        "loss_and_gradient_are_those_of_float64 and 2-dtype0",
        "half_gradients_are_added",
        "is_that_of_float64 and size0-dtype0",
        "gradients_are_those_of_float64_rounded_once and none-shape0-dtype0",
    ]
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_each_kernel_compiles() -> None:  # about 8 s, and not slow: CI has no GPU and no other test of this
    names = {build.kernel for build in run_interpreted(*map(str, FILES), "-k", FEW, builds_all=False)}
    assert names >= {
        "norm_kernel",
        "norm_backward_kernel",
        "batch_norm_kernel",
        "batch_norm_backward_kernel",
        "gelu_kernel",
        "gelu_backward_kernel",
        "cross_entropy_backward_kernel",
        "pixel_loss_gradient_kernel",
        "gather_axis_kernel",
        "depthwise_conv_kernel",
        "depthwise_input_grad_kernel",
        "depthwise_weight_grad_kernel",
        "narrow_weight_grad_kernel",
    }


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_launch_that_no_gpu_can_run_is_named() -> None:
    from gpu_builds import compile_launches

    launch = {"module": "mezzo.kernels._norm_kernels", "kernel": "column_sums_kernel", "options": {"num_warps": 4}}
    arguments = {
        "parts": {"tensor": "float32", "is_aligned": True},
        **{key: {"tensor": "float16", "is_aligned": True} for key in ("first", "second", "third")},
    }
    sizes = {"count": 16, "size": 16, "BLOCK": 64}
    with pytest.raises(AssertionError, match="ROWS"):
        compile_launches([{**launch, "arguments": {**arguments, **sizes, "ROWS": 31}}], builds_all=False)
    builds = compile_launches([{**launch, "arguments": {**arguments, **sizes, "ROWS": 32}}], builds_all=False)
    assert [build.kernel for build in builds] == ["column_sums_kernel"]
