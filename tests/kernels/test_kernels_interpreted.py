"""The Triton kernels of mezzo.kernels without a GPU: their tests, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def test_the_kernels_pass_their_tests_in_tritons_interpreter() -> None:
    files = ("test_kernels.py", "test_linear_cross_entropy.py", "test_batch_norm.py", "test_gelu.py")
    run_interpreted(*(str(Path(__file__).with_name(name)) for name in files))
