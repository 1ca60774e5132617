"""What `mezzo check` says about releases of torch and backends, and what mezzo does on a refused device."""

import json
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo import Precision, amp
from mezzo.amp import support
from mezzo.cli import run

REFUSED = [name for name, state in support.BACKENDS.items() if state == "refused"]
#: torch itself makes tensors without memory on these; npu and mlu come with plug-ins.
WITHOUT_PLUGIN = [name for name in REFUSED if name in ("xpu", "mps")]


@pytest.mark.parametrize("version", [*support.TESTED_TORCH, "2.15.1", "2.13.0+cpu", "2.14.0a0+git1234567"])
def test_a_tested_release_is_named_so(version: str) -> None:
    assert support.is_supported_torch(version)
    assert support.describe_torch(version).startswith("tested")


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20261101+cu130", "2.100", "3.0.0"])
def test_a_release_newer_than_the_tested_ones_is_untested_but_allowed(version: str) -> None:
    assert support.is_supported_torch(version)
    assert support.describe_torch(version).startswith("untested: newer than 2.15")


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cu128", "1.13.1"])
def test_a_release_that_is_too_old_is_not_supported(version: str) -> None:
    assert not support.is_supported_torch(version)
    assert support.describe_torch(version).startswith("not supported: mezzo needs torch 2.11 or newer")


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'git1234567': must begin with two numbers"):
        support.parse_release("git1234567")


def test_the_oldest_tested_release_is_the_one_that_pip_asks_for() -> None:
    from pathlib import Path

    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r'"torch>=([\d.]+)"', project)
    assert needed is not None
    assert support.parse_release(needed[1]) == support.parse_release(support.TESTED_TORCH[0])


def check(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = run(["check", *options])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "code", "line"),
    [
        ("2.15.0+cu130", 0, "torch release +tested"),
        ("2.16.0", 0, "torch release +untested: newer than 2.15, the newest tested release"),
        ("2.10.0", 1, "torch release +not supported: mezzo needs torch 2.11 or newer"),
    ],
)
def test_check_says_in_one_line_whether_the_release_is_tested(
    version: str, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    done, out = check(capsys)
    assert done == code
    assert len(re.findall(f"^{line}", out, flags=re.MULTILINE)) == 1
    assert ("not usable" in out.splitlines()[-1]) == bool(code)


def test_check_says_in_one_line_which_backends_are_tested(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = check(capsys)
    line = "CPU tested; CUDA tested on an H200; ROCm untested; XPU, MPS, NPU, MLU refused"
    assert re.search(f"^backends +{line}$", out, flags=re.MULTILINE)
    _, data = check(capsys, "--json")
    assert json.loads(data)["support"] == support.BACKENDS


@pytest.mark.parametrize("device", REFUSED)
def test_a_refused_device_type_is_an_error_of_the_region(device: str) -> None:
    with pytest.raises(ValueError, match="mezzo casts tensors on cuda and cpu only"):
        amp.auto_cast(device)  # type: ignore[arg-type]


PREPARE = {
    "decorate": lambda model: amp.decorate(model),
    "decorate O1": lambda model: amp.decorate([model], level="O1"),
    "Precision O1": lambda model: Precision("O1").prepare(model),
    "Precision O2": lambda model: Precision("O2").prepare(model, fuse=True),
}


@pytest.mark.parametrize("prepare", PREPARE.values(), ids=PREPARE)
@pytest.mark.parametrize("device", WITHOUT_PLUGIN)
def test_a_model_on_a_refused_device_is_not_prepared(device: str, prepare: Any) -> None:
    """Half weights would have no lists there; at O1 it would train in float32 without a word."""
    with FakeTensorMode():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(2, device=device))
        with pytest.raises(ValueError, match=rf"'weight' is on {device}.*: mezzo casts tensors on cuda and cpu only"):
            prepare(model)
        assert model.weight.dtype is torch.float32
        assert Precision("O0").prepare(model) is model


def test_a_model_without_memory_may_be_decorated() -> None:
    model = amp.decorate(nn.Linear(2, 2, device="meta"))
    assert model.weight.dtype is torch.float16
