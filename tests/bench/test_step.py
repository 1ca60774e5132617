"""`mezzo bench step`: what is measured, and what is made of it."""

import json

import pytest
import torch

from mezzo.bench import (
    MachineClocks,
    StepBench,
    StepMeasurement,
    StepRecipe,
    StepSettings,
    Timing,
    bench_step,
    small_net_workload,
)
from mezzo.cli import run
from mezzo.record import time_on_device


@pytest.fixture(scope="module")
def small_run() -> StepBench:
    return bench_step(size=16, batch_size=8, steps=2, models=("SimpleNet",), optimizers=("AdamW",), device="cpu")


def test_every_recipe_trains_to_the_loss_of_float32(small_run: StepBench) -> None:
    names = [result.recipe.name for result in small_run.results]
    assert names[:4] == [
        "stock float32",
        "stock float16 foreach",
        "stock float16 foreach, grads kept",
        "stock float16 fused",
    ]
    assert "mezzo bfloat16 O2, clipped" in names
    assert "mezzo float16 O2, compact masters" in names
    assert len(names) == len(set(names)) == 26
    for result in small_run.results:
        # A bfloat16 product is right to 2**-9, and its error in a loss of few numbers is of that size.
        assert result.loss == pytest.approx(small_run.float32(result).loss, rel=5e-3)
        assert result.timing.median_s > 0
        assert result.update_s > 0


def test_clipping_is_the_same_for_stock_and_mezzo(small_run: StepBench) -> None:
    losses = {r.recipe.name: r.loss for r in small_run.results}
    assert losses["mezzo float16 O1, clipped"] == pytest.approx(losses["stock float16 fused, clipped"], rel=1e-4)
    assert losses["stock float32, clipped"] != losses["stock float32"]


def made(recipe: StepRecipe, median_s: float, **more: float) -> StepMeasurement:
    return StepMeasurement(
        model="net",
        optimizer="SGD",
        recipe=recipe,
        timing=Timing((median_s,)),
        update_s=more.get("update_s", 0.5),
        update_bytes=1000,
        loss=more.get("loss", 2.0),
        peak_memory_bytes=None,
    )


def made_bench(*results: StepMeasurement) -> StepBench:
    machine = MachineClocks(
        device="d", mem_clock="-", sm_clock="-", cpu_clocks="-", torch_version="t", driver_version="v"
    )
    settings = StepSettings(device="cpu", size=1, batch_size=1, steps=1, models=("net",), optimizers=("SGD",))
    return StepBench(settings=settings, results=results, copy_bytes_per_s=4000.0, machine=machine)


def test_ratios_are_against_the_best_stock_run_of_the_same_kind() -> None:
    ours = made(StepRecipe("mezzo", "O2", "float16"), 2.0, loss=2.002)
    bench = made_bench(
        made(StepRecipe("stock", "float32", "float32"), 20.0),
        made(StepRecipe("stock", "foreach", "float16"), 4.0),
        made(StepRecipe("stock", "fused", "float16"), 3.0),
        made(StepRecipe("stock", "fused", "float16", keeps_grads=True), 5.0),
        made(StepRecipe("stock", "fused", "bfloat16"), 1.0),
        made(StepRecipe("stock", "float32", "float32", clips=True), 9.0),
        made(StepRecipe("stock", "fused", "float16", clips=True), 1.0),
        ours,
    )
    assert bench.speedup(ours) == 1.5
    assert bench.speedup(ours, keeps_grads=True) == 2.5
    assert bench.share_of_copy(ours) == 0.5
    assert bench.table()[-1] == [
        "net", "SGD", "mezzo float16 O2", "2000.000 ms", "0.000 ms", "1.50", "2.50", "10.00",
        "500.000 ms", "50%", "-", "2.002000", "+1.0e-03",
    ]  # fmt: skip
    assert bench.table()[1][6] == "-"  # nothing kept gradients in float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "Adamw"], "--optimizer"),
        (["--model", "BigNet"], "--model"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert run(["bench", "step", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_json_is_all_that_stdout_holds(capsys: pytest.CaptureFixture) -> None:
    command = [
        "bench",
        "step",
        "--size",
        "8",
        "--batch-size",
        "4",
        "--steps",
        "1",
        "--optimizer",
        "SGD",
        "--model",
        "SimpleNet",
        "--device",
        "cpu",
    ]
    assert run([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["size"] == 8
    assert {result["optimizer"] for result in data["results"]} == {"SGD"}
    assert data["results"][0]["recipe"] == {
        "by": "stock", "level": "float32", "dtype": "float32", "clips": False, "keeps_grads": False, "compact": False,
    }  # fmt: skip


def test_text_has_the_table_and_the_machine(
    small_run: StepBench, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mezzo.bench.bench_step", lambda **_: small_run)
    assert run(["bench", "step"]) == 0
    text = capsys.readouterr().out
    assert "SimpleNet, size 16, batch size 8; 2 steps a recipe; a copy reaches" in text
    assert "| mezzo float16 O2, clipped" in text
    assert f"torch {torch.__version__}" in text


@pytest.mark.slow
def test_the_net_of_many_small_tensors_has_142_and_learns() -> None:
    bench = bench_step(steps=1, models=("SmallNet",), optimizers=("SGD",), device="cpu")
    assert len(list(small_net_workload(torch.device("cpu")).model.parameters())) == 142
    for result in bench.results:
        assert result.loss == pytest.approx(bench.float32(result).loss, rel=5e-3)


@pytest.mark.gpu
def test_time_on_the_device_leaves_the_host_out() -> None:
    device = torch.device("cuda", 0)
    source = torch.ones(2**28, device=device)
    target = torch.empty_like(source)
    timing = time_on_device(lambda: target.copy_(source), calls=5, warmup_calls=1, device=device)
    assert len(timing.times_s) == 5
    # 2 GiB: no GPU moves more than 20 TB/s, and none that this library is for less than 100 GB/s.
    assert 1e-4 < timing.median_s < 2e-2
