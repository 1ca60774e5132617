"""Triton kernels without a GPU: their tests, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

HERE = Path(__file__).parent
FILES = [HERE / "test_enlarge.py", HERE / "test_pixel_loss.py", HERE.parent / "static" / "test_convolutions.py"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_kernels_pass_their_tests_in_tritons_interpreter(file: Path) -> None:
    run_interpreted(str(file))
