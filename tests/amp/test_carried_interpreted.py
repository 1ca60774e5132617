"""The carried-out decisions without a GPU: their tests, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def test_decisions_are_carried_out_by_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(str(Path(__file__).with_name("test_carried.py")))
