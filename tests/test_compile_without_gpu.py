"""`tools/compile_without_gpu.py`: it builds a step for CUDA where torch has CUDA and the machine has no driver."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[1] / "tools" / "compile_without_gpu.py"


def compile_step(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=500)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_torch_without_cuda_is_one_line_that_names_another() -> None:
    result = compile_step("SimpleNet")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "make .torch/" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA (make test-torch TORCH=2.11.0 has it)")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_step_for_cuda_uses_the_kernels_of_mezzo(tmp_path: Path) -> None:
    result = compile_step("mobilenet_v3_small", "--batch-size", "8", "--code", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "mezzo.batch_norm_backward.default" in result.stdout
    assert "triton_" in (tmp_path / "forward.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA (make test-torch TORCH=2.11.0 has it)")
def test_an_unknown_network_is_one_line_with_the_nearest_name() -> None:
    result = compile_step("mobilenet_v3_smal")
    assert result.returncode == 2
    assert "mobilenet_v3_small" in result.stderr.splitlines()[-1]
