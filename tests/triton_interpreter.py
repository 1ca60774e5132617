"""Runs tests of Triton kernels without a GPU, in Triton's interpreter."""

import os
import subprocess
import sys


def run_interpreted(*arguments: str) -> None:
    """Run pytest with `arguments` in another process, where kernels run in Python on the CPU; it must pass."""
    # numpy, which the interpreter computes with, warns of the infinities that the tests are about.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
