"""What a type checker makes of `decorate`, and of calls in torch's words."""

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

DIALECTS = """
import torch
from mezzo.amp import AmpScaler, GradScaler, auto_cast

scaler = GradScaler("cuda", init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, enabled=True)
scaler.update(new_scale=torch.ones(1))
GradScaler("cuda", 4.0, 2.0, 0.5, 9, True, decr_every_n_nan_or_inf=1)
GradScaler(init_scale=4.0)
GradScaler(init_loss_scaling=4.0, incr_ratio=2.0)
AmpScaler(enable=False)
auto_cast("cuda", torch.bfloat16)
auto_cast(device_type="cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=False)
auto_cast(enabled=False)
auto_cast(level="O2", dtype="bfloat16")
GradScaler(init_loss_scaling=4.0, init_scale=4.0)  # type: ignore[call-overload]
auto_cast(enable=True, enabled=True)  # type: ignore[call-overload]
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [CODE, DIALECTS], ids=["decorate", "dialects"])
def test_mypy_finds_the_types_that_were_given(code: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parents[2]
    (tmp_path / "use.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(tmp_path / "use.py")]
    environment = {**os.environ, "MYPYPATH": str(root / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
