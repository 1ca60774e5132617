import json
from pathlib import Path

import pytest

from mezzo.cli import run

CODE = """
import time
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Conv2d(3, 61, 3, padding=1), nn.ReLU(), nn.Conv2d(61, 8, 1))
    return model, torch.randn(2, 3, 16, 16), torch.randn(2, 8, 16, 16), nn.functional.mse_loss

def fails():
    model, *rest = build()
    model.append(nn.Conv2d(9, 9, 1))
    return model, *rest

class Slow:
    num_workers = 2
    def __iter__(self):
        for _ in range(20):
            time.sleep(0.2)
            yield 0

def no_loader():
    return 5

def bad_loader():
    raise OSError("no such folder")
"""
SMALL = ["--device", "cpu", "--steps", "1"]


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(CODE)
    return str(tmp_path / "net.py")


def test_it_prints_times_and_advice(net, capsys):
    assert run(["doctor", f"{net}:build", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "float32 " in out
    assert "shape: 0" in out
    assert "4 -> 64 channels" in out
    assert "float32 step: 1 steps done" in err


def test_json_is_all_that_stdout_holds_and_a_slow_loader_is_in_it(net, capsys):
    assert run(["doctor", f"{net}:build", *SMALL, "--loader", f"{net}:Slow", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (loader,) = [advice for advice in data["advices"] if advice["kind"] == "loader"]
    assert loader["where"] == "Slow"
    assert "with 2 workers" in loader["seen"]


def test_apply_writes_the_changes_and_page_a_page(net, tmp_path, capsys):
    changes, page = tmp_path / "made" / "changes.yml", tmp_path / "page.html"
    assert run(["doctor", f"{net}:build", *SMALL, "--apply", str(changes), "--page", str(page)]) == 0
    assert changes.exists()
    assert "<html" in page.read_text()
    assert f"{changes}: " in capsys.readouterr().err


def test_a_network_of_the_registry_is_examined(capsys):
    assert run(["doctor", "mobilenet_v3_small", *SMALL, "--batch-size", "2", "--image-size", "32"]) == 0
    assert "amdahl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["no_such_net"], 2, "unknown model 'no_such_net'"),
        (["{net}:build", "--level", "O0"], 2, "unknown --level 'O0'; allowed: O1, O2, O3"),
        (["{net}:build", "--fp8", "emulate"], 2, "fp8 with level='O1': it belongs to level O3"),
        (
            ["{net}:build", "--level", "O3", "--fp8", "grad=e4m3"],
            2,
            "fp8: unknown setting 'grad'; did you mean 'gradient'?",
        ),
        (["{net}:build", "--dtype", "fp8"], 2, "unknown --dtype 'fp8'"),
        (["{net}:build", "--steps", "0"], 2, "steps=0: must be at least 1"),
        (["{net}:build", "--apply", "{folder}"], 2, "is a folder; give the name of a file"),
        (["{net}:build", "--page", "{folder}"], 2, "is a folder; give the name of a file"),
        (["{net}:build", "--loader", "net"], 2, "--loader 'net': must be FILE:FACTORY"),
        (["{net}:build", "--loader", "gone.py:f"], 2, "--loader 'gone.py:f': there is no file 'gone.py'"),
        (["{net}:build", "--loader", "{net}:no_loader"], 2, "returned int, must return a data loader"),
        (["{net}:build", "--loader", "{net}:bad_loader"], 1, "raised OSError: no such folder"),
        (["{net}:fails"], 1, "training failed: RuntimeError"),
    ],
)
def test_what_is_wrong_is_one_line_and_its_code(net, tmp_path, capsys, options, code, message):
    words = [word.format(net=net, folder=tmp_path) for word in options]
    assert (
        run(["doctor", *words, *(word for word in SMALL if word not in ("--steps", "1") or "--steps" not in words)])
        == code
    )
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("mezzo: ")
    assert message in err[-1]
