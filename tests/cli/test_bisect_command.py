import json
from pathlib import Path

import pytest
import yaml

from mezzo.amp import Policy
from mezzo.cli import run
from mezzo.proof import _bisect_runs

CODE = """
import torch
from torch import nn

class Far(nn.Module):
    def forward(self, x):
        return x * FACTOR / FACTOR

def build():
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(16, 16))
    model.add_module("far", Far())
    model.add_module("head", nn.Linear(16, 4))
    return model, torch.randn(32, 16), torch.randint(4, (32,)), nn.functional.cross_entropy
"""
SMALL = ["--device", "cpu", "--steps", "1", "--level", "O2"]


def write_net(folder: Path, factor: float) -> str:
    (folder / "net.py").write_text(f"FACTOR = {factor}\n{CODE}")
    return f"{folder / 'net.py'}:build"


def test_it_prints_each_evaluation_and_the_set_and_writes_the_list(tmp_path, capsys):
    lists = tmp_path / "made" / "fp32.yml"
    assert run(["bisect", write_net(tmp_path, 1e6), *SMALL, "--output", str(lists)]) == 0
    captured = capsys.readouterr()
    assert "| run | modules in float32 | loss difference | passed |" in captured.out
    assert "net.py:build, float16 O2, 5 evaluations, 60 allowed" in captured.out
    assert "1 of 3 modules must stay in float32: far (loss difference inf without," in captured.out
    assert captured.err == f"bisect: 5 steps done\nlists written to {lists}\n"
    assert yaml.safe_load(lists.read_text()) == {"excluded_layers": ["far"]}


FP8_CODE = """
import torch
from torch import nn

class Shifted(nn.Linear):  # around 64 e4m3 counts in steps of 8
    def forward(self, x):
        shift = nn.functional.linear(torch.full_like(x[:3], 64.0), self.weight)[:1]
        return super().forward(x + 64.0) - shift

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Shifted(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    return model, torch.randn(32, 16), torch.randn(32, 16), nn.functional.mse_loss
"""


def test_at_o3_it_writes_the_layers_that_must_stay_in_half(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FP8_CODE)
    lists = tmp_path / "half.yml"
    options = ["--level", "O3", "--metric", "output", "--tolerance", "0.15", "--fp8", "min_width=0,min_size=0"]
    assert run(["bisect", f"{tmp_path / 'net.py'}:build", "--device", "cpu", *options, "--output", str(lists)]) == 0
    assert "1 of 2 modules must stay in half: 1 (output" in capsys.readouterr().out
    assert yaml.safe_load(lists.read_text()) == {"half_layers": ["1"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--level", "O3", "--by", "ops"], "level='O3' needs by='modules'"),
        (["--level", "O2", "--fp8", "emulate"], "fp8 with level='O2': it belongs to level O3"),
        (["--level", "O3", "--fp8", "history=0"], "Fp8Recipe: history=0: must be a whole number, 1 or more"),
    ],
)
def test_a_mistake_about_fp8_is_one_line_and_2(tmp_path, capsys, options, message):
    (tmp_path / "net.py").write_text(FP8_CODE)
    assert run(["bisect", f"{tmp_path / 'net.py'}:build", "--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"mezzo: {message}"


def test_json_is_all_that_stdout_holds(tmp_path, capsys):
    options = ["--by", "ops", "--metric", "finite", "--json"]
    assert run(["bisect", write_net(tmp_path, 1e6), *SMALL, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kept"] == (["mul"] if Policy.create("O2").use_promote else ["div", "mul"])
    assert data["value_with"] == 0


def test_a_network_of_the_registry_that_needs_nothing_is_0(capsys):
    assert run(["bisect", "mobilenet_v3_small", *SMALL, "--batch-size", "2", "--tolerance", "0.5"]) == 0
    assert "nothing must stay in float32: loss" in capsys.readouterr().out


def test_precision_that_is_not_the_cause_is_1_and_no_list_is_written(tmp_path, capsys):
    lists = tmp_path / "fp32.yml"
    assert run(["bisect", write_net(tmp_path, 0.0), *SMALL, "--output", str(lists)]) == 1
    assert "precision is not the cause: loss difference inf with all 3 modules in float32" in capsys.readouterr().out
    assert not lists.exists()


def test_a_search_that_runs_out_is_1_and_its_list_passes_all_the_same(tmp_path, capsys):
    lists = tmp_path / "fp32.yml"
    options = ["--max-evaluations", "3", "--output", str(lists)]
    assert run(["bisect", write_net(tmp_path, 1e6), *SMALL, *options]) == 1
    assert "3 evaluations were not enough" in capsys.readouterr().out
    assert "far" in yaml.safe_load(lists.read_text())["excluded_layers"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["none.py:build"], "'none.py:build': there is no file 'none.py'"),
        (["mobilenet_v3_smal"], "unknown model 'mobilenet_v3_smal'; did you mean 'mobilenet_v3_small'?"),
        (["mobilenet_v3_small", "--dtype", "float61"], "unknown --dtype 'float61'; did you mean 'float16'?"),
        (["mobilenet_v3_small", "--by", "layers"], "unknown by 'layers'; allowed: modules, ops"),
        (["mobilenet_v3_small", "--level", "O0"], "level='O0': must be one of OD, O1, O2"),
        (["mobilenet_v3_small", "--batch-size", "0"], "batch_size=0: must be at least 1"),
        (["mobilenet_v3_small", "--max-evaluations", "2"], "max_evaluations=2: must be at least 3"),
        (["mobilenet_v3_small", "--output", "."], "--output .: is a folder; give the name of a file"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_2(capsys, arguments, line):
    assert run(["bisect", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mezzo: {line}")
    assert err.count("\n") == 1


def test_a_wrong_option_for_an_own_model_is_2(tmp_path, capsys):
    assert run(["bisect", write_net(tmp_path, 1.0), "--device", "cpu", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "mezzo: steps=0: must be at least 1\n"


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("raise KeyError('x')", "net.py:8: training failed: KeyError: 'x'"),
        ("raise ValueError('odd')", "net.py:8: training failed: ValueError: odd"),
        ("return x.view(-1)", "net.py: training failed: RuntimeError"),
    ],
)
def test_a_model_that_raises_is_one_line_and_1(tmp_path, capsys, forward, said):
    reference = write_net(tmp_path, 1.0)
    path = tmp_path / "net.py"
    path.write_text(path.read_text().replace("return x * FACTOR / FACTOR", forward))
    assert run(["bisect", reference, *SMALL]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_out_of_memory_says_what_to_make_smaller(tmp_path, capsys, monkeypatch):
    import torch

    def fail(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mezzo.bench._commands.bisect", fail)
    assert run(["bisect", write_net(tmp_path, 1.0), *SMALL]) == 1
    assert capsys.readouterr().err.startswith(
        "mezzo: out of memory on cpu with a batch of 32; give a smaller --batch-size"
    )


@pytest.mark.parametrize(
    ("stop_at", "said"),
    [
        (1, "stopped after 0 evaluations; no set that passes is known yet"),
        (3, "stopped after 2 evaluations; passes with 3 in float32: encoder, far, head"),
    ],
)
def test_ctrl_c_tells_the_best_set_so_far_and_writes_nothing(tmp_path, capsys, monkeypatch, stop_at, said):
    calls = []
    measure = _bisect_runs.Runs.measure

    def interrupted(self, kept):
        calls.append(kept)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return measure(self, kept)

    monkeypatch.setattr(_bisect_runs.Runs, "measure", interrupted)
    lists = tmp_path / "fp32.yml"
    assert run(["bisect", write_net(tmp_path, 1e6), *SMALL, "--output", str(lists)]) == 130
    assert said in capsys.readouterr().err
    assert not lists.exists()
