"""The probe builds and runs, where Triton works."""

import subprocess
import sys

import pytest


def test_the_probe_runs_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    code = "from mezzo._torch.triton_probe import try_kernel; try_kernel('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ['TRITON_INTERPRET'] = '1'; {code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.gpu
def test_the_probe_runs_on_a_gpu() -> None:
    from mezzo._torch.triton_probe import try_kernel

    try_kernel("cuda")
