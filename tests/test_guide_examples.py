"""The guide's programs run as their first lines say, learn, and agree with float32."""

import copy
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = [
    *(f"dynamic/{name}.py" for name in ("fp32", "o1", "o2", "accumulate")),
    "distributed.py",
    "hf_text.py",
]
SMALL = ["--size", "64", "--batch-size", "32", "--device", "cpu", "--cpu-compute", "native"]
Run = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Return a function that runs a script with options, and gives its names and what it printed."""
    shared = sys.modules.pop("simple_net", None)  # the static programs have one of that name
    torch.set_num_threads(1)  # products this small wait longer for threads than they compute

    def run_script(script: str, *options: str) -> tuple[dict[str, Any], str]:
        path = EXAMPLES / script
        monkeypatch.setattr(sys, "argv", [path.name, *options])
        monkeypatch.syspath_prepend(str(path.parent))
        names = runpy.run_path(str(path), run_name="__main__")
        return names, capsys.readouterr().out

    yield run_script
    sys.modules.pop("simple_net", None)
    if shared is not None:
        sys.modules["simple_net"] = shared


def losses_of(text: str) -> tuple[float, float]:
    found = re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", text)
    assert found is not None, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_begins_with_what_the_script_does_and_its_command(
    script: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(script, "--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"^python examples/{script}( --\w+ \d+)?( +#.*)?$", text, re.MULTILINE), text


def test_o1_and_o2_learn_as_float32_does_and_show_their_dtypes(run: Run) -> None:
    texts = {name: run(f"dynamic/{name}.py", *SMALL, "--lr", "0.1")[1] for name in ("fp32", "o1", "o2")}
    expected = losses_of(texts["fp32"])
    assert expected[1] < 0.3 * expected[0]
    # Every output is rounded to 11 bits; the mean over 2048 of them is not further off than one of them.
    for name in ("o1", "o2"):
        assert losses_of(texts[name]) == pytest.approx(expected, rel=2**-11)
        assert "output: torch.float16; matrix products: 9 in float16, 0 in float32" in texts[name]
    assert "output: torch.float32; matrix products: 0 in float16, 9 in float32" in texts["fp32"]
    assert "(median of 20)" in texts["fp32"]  # the guide's two epochs of ten batches


def test_defaults_are_those_of_the_guide(run: Run) -> None:
    options = run("dynamic/accumulate.py", "--size", "8", "--batch-size", "4", "--device", "cpu")[0]["options"]
    assert (options.epochs, options.batches, options.lr, options.accumulate) == (2, 10, 0.0001, 10)


def test_accumulated_gradients_are_those_of_one_large_batch(run: Run) -> None:
    small = [*SMALL, "--epochs", "1", "--batches", "4", "--accumulate", "4", "--lr", "0.5"]
    names, _ = run("dynamic/accumulate.py", *small)
    options, model = names["options"], names["model"]
    before = names["make_model"](options)
    # In float64, the four batches as one.
    expected = copy.deepcopy(before).double()
    data, label = (torch.cat(parts).double() for parts in zip(*names["batches"](options), strict=True))
    nn.functional.mse_loss(expected(data), label).backward()
    # A gradient has passed nine layers forward and backward; each rounds to 11 bits, and roundings add up as squares do.
    tolerance = math.sqrt(2 * 9) * 2**-11
    for start, now, right in zip(before.parameters(), model.parameters(), expected.parameters(), strict=True):
        change = (now - start).detach().double()
        difference = (change + options.lr * right.grad).norm() / (options.lr * right.grad).norm()
        assert difference < tolerance


def test_accumulation_learns_with_fewer_steps(run: Run) -> None:
    _, text = run("dynamic/accumulate.py", *SMALL, "--lr", "0.1", "--accumulate", "2")
    first, last = losses_of(text)
    assert last < 0.6 * first


def test_batches_that_would_be_left_over_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("dynamic/accumulate.py", *SMALL, "--accumulate", "3")
    assert exit_.value.code == 2
    assert "--accumulate 3: must divide the 20 batches" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about a group of one process
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapped_network_learns_in_a_group_of_one(
    level: str, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        run("distributed.py", "--device", "cpu", "--size", "16", "--level", level)
    assert exit_.value.code == 0
    first, last = map(float, re.findall(r"^step \d+: loss ([\d.]+)", text := capsys.readouterr().out, re.MULTILINE))
    assert last < 0.5 * first
    assert "gloo: the losses are equal" in text


@pytest.mark.slow
def test_without_torchrun_it_starts_two_processes() -> None:
    command = [sys.executable, str(EXAMPLES / "distributed.py"), "--device", "cpu", "--size", "16"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "process 1: loss" in done.stdout


def launch(*options: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(EXAMPLES / "distributed.py"), "--device", "cpu", "--size", "16", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_processes_with_data_of_their_own_end_with_the_same_loss(dtype: str) -> None:
    text = launch("--dtype", dtype)
    losses = re.findall(r"process [01]: loss ([\d.]+) on the same batch, torch\.float32", text)
    assert len(losses) == 2
    assert len(set(losses)) == 1
    assert "gloo: the losses are equal" in text
    assert float(losses[0]) < 0.5 * float(re.findall(r"step 0: loss ([\d.]+)", text)[0])


@pytest.mark.slow
def test_wrapping_first_is_refused_in_every_process() -> None:
    text = launch("--wrap-first")
    for rank in range(2):
        assert (
            f"process {rank}: call decorate() or Precision.prepare() first, then wrap with DistributedDataParallel"
            in text
        )


def test_without_transformers_one_line_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as exit_:
        run("hf_text.py")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "transformers is not installed; pip install transformers\n"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "column"), [("float16", 0), ("bfloat16", 1)])
def test_a_model_of_another_library_learns_at_o2_in_half(dtype: str, column: int, run: Run) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    small = ["--steps", "15", "--size", "32", "--length", "32", "--device", "cpu", "--cpu-compute", "native"]
    _, text = run("hf_text.py", *small, "--dtype", dtype)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)  torch\.float32", text)]
    assert losses[-1] < 0.8 * losses[0]
    found = re.search(r"^  addmm +\|  (\d+) +\|  (\d+) +\|  (\d+) +\|  (\d+)", text, re.MULTILINE)
    assert found is not None, text
    counts = [int(count) for count in found.groups()]
    assert counts[column] == sum(counts) == 8  # two layers with four products each


def test_a_model_of_another_library_needs_ten_lines() -> None:
    code = (EXAMPLES / "hf_text.py").read_text(encoding="utf-8")
    block = code[code.index("    optimizer =") : code.index("        if step % 10")]
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
