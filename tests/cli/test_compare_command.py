import json

import pytest

from mezzo.cli import run
from mezzo.errors import RunError

SMALL = ["compare", "--size", "16", "--batch-size", "4", "--steps", "1", "--device", "cpu"]


def test_compare_prints_the_table_the_machine_and_the_operators(capsys):
    assert run(SMALL) == 0
    captured = capsys.readouterr()
    assert "| AMP-O1" in captured.out
    assert "Running with CPU Clocks" in captured.out
    assert "op list" in captured.out
    assert captured.err == "float32: 4 steps done\nAMP-O1: 4 steps done\nAMP-O2: 4 steps done\n"


def test_levels_are_chosen_with_commas_and_o3_is_emulated_on_a_cpu(capsys):
    assert run([*SMALL, "--levels", "O2, O3", "--fp8", "min_width=0,min_size=0", "--batch-size", "16"]) == 0
    captured = capsys.readouterr()
    assert "| float32   | AMP-O2    | AMP-O3    |" in captured.out
    assert "| FP8 products   | -         | -         | 7 of 9    |" in captured.out
    assert "Operators of one recorded AMP-O3 step" in captured.out
    assert "Its FP8 products are emulated (a CPU has no FP8 products)" in captured.out
    assert captured.err == "float32: 4 steps done\nAMP-O2: 4 steps done\nAMP-O3: 4 steps done\n"


def test_json_is_all_that_stdout_holds(capsys):
    assert run([*SMALL, "--json", "--dtype", "bfloat16"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["dtype"] == "bfloat16"
    assert len(data["modes"]) == 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dtype", "float61"], "unknown --dtype 'float61'; did you mean 'float16'?"),
        (["--size", "0"], "--size 0: must be at least 1"),
        (["--levels", "O2,O4"], "unknown --levels 'O4'; allowed: float32, O0, O1, O2, O3"),
        (["--fp8", "emulate"], "--fp8 is about level O3, which is not compared; add O3 to --levels"),
        (["--levels", "O3", "--fp8", "scaling=late"], "Fp8Recipe: unknown scaling 'late'"),
        (["--size", "x"], "Invalid value for '--size'"),
        (["--model", "none.py:build"], "--model 'none.py:build': there is no file 'none.py'"),
    ],
)
def test_bad_option_is_one_line_and_2(capsys, arguments, line):
    assert run(["compare", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mezzo: {line}")
    assert err.count("\n") == 1


OWN_BATCH = """
import torch
from torch import nn

def build():
    return nn.Linear(4, 4), torch.randn(16, 4), torch.randn(16, 4), nn.functional.mse_loss

def wordless():
    return nn.Embedding(4, 4), torch.tensor(1), torch.randn(4), nn.functional.mse_loss
"""


def test_the_header_has_the_batch_of_the_factory(tmp_path, capsys):
    (tmp_path / "net.py").write_text(OWN_BATCH)
    options = ["--steps", "1", "--device", "cpu"]
    assert run(["compare", "--model", f"{tmp_path}/net.py:build", *options]) == 0
    assert "net.py:build, batch size 16, 1 steps" in capsys.readouterr().out
    assert run(["compare", "--model", f"{tmp_path}/net.py:wordless", *options]) == 0
    assert "net.py:wordless, its own batch, 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["compare", "--model"], ["doctor"], ["bisect"]])
def test_a_batch_size_that_the_factory_does_not_take_is_one_line_and_2(tmp_path, capsys, command):
    (tmp_path / "net.py").write_text(OWN_BATCH)
    assert run([*command, f"{tmp_path}/net.py:build", "--batch-size", "4", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mezzo: --batch-size 4: ")
    assert "makes its own batch of 16; let the factory take batch_size" in err
    assert err.count("\n") == 1


def test_out_of_memory_is_one_line_and_1(capsys, monkeypatch):
    def fail(**_):
        raise RunError("out of memory on cuda:0 with --size 9 --batch-size 9; choose a smaller --size or --batch-size")

    monkeypatch.setattr("mezzo.bench.compare", fail)
    assert run(["compare"]) == 1
    assert capsys.readouterr().err.startswith("mezzo: out of memory on cuda:0 with --size 9 --batch-size 9;")


def test_terminal_gets_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run([*SMALL, "--json"]) == 0
    captured = capsys.readouterr()
    assert "float32" in captured.err
    assert "\x1b" in captured.err
    assert json.loads(captured.out)
