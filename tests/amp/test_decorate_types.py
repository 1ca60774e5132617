"""What a type checker makes of `decorate`: the types that were given come back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from typing import assert_type
import torch
from torch import nn
from mezzo.amp import decorate

class Net(nn.Module):
    size: int = 3

net, other = Net(), Net()
adam = torch.optim.AdamW(net.parameters())
sgd = torch.optim.SGD(other.parameters())
maybe: torch.optim.SGD | None = None

assert_type(decorate(net), Net)
assert_type(decorate(net, level="O2", dtype=torch.bfloat16).size, int)
assert_type(decorate([net, other]), list[Net])
assert_type(decorate((net, other)), tuple[Net, Net])
assert_type(decorate(net, adam), tuple[Net, torch.optim.AdamW])
assert_type(decorate(net, adam, "O2", "float16", master_weight="compact"), tuple[Net, torch.optim.AdamW])
assert_type(decorate([net, other], [adam]), tuple[list[Net], list[torch.optim.AdamW]])
assert_type(decorate(net, [sgd, sgd]), tuple[Net, list[torch.optim.SGD]])
assert_type(decorate([net], sgd), tuple[list[Net], torch.optim.SGD])
assert_type(decorate(net, optimizers=None), Net)
decorate(net, "adam")  # type: ignore[type-var]
decorate(3)  # type: ignore[call-overload]
"""


@pytest.mark.slow
def test_mypy_finds_the_types_that_were_given(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parents[2]
    (tmp_path / "use.py").write_text(CODE)
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(tmp_path / "use.py")]
    environment = {**os.environ, "MYPYPATH": str(root / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
