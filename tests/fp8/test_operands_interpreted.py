"""The Triton kernels of FP8 operands without a GPU: the tests of operands, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

OPERANDS = str(Path(__file__).with_name("test_operands.py"))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_kernels_make_the_operands_that_torch_makes() -> None:
    run_interpreted(OPERANDS, builds_all=False)


@pytest.mark.slow
def test_every_launch_of_these_kernels_compiles() -> None:
    run_interpreted(OPERANDS)
