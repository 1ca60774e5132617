"""The Triton kernels of FP8 operands without a GPU: the tests of operands, run by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_kernels_make_the_operands_that_torch_makes() -> None:
    tests = Path(__file__).with_name("test_operands.py")
    # numpy, which the interpreter computes with, warns of the infinities that the tests are about.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", str(tests)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
