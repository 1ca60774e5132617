"""`mezzo bench static`: what is measured, and what is made of it."""

import json

import pytest

from graph_backends import skip_without_compiler, use_backend
from mezzo.bench import (
    STATIC_RECIPES,
    MachineClocks,
    StaticBench,
    StaticRecipe,
    StaticResult,
    StaticSettings,
    bench_static,
)
from mezzo.cli import run
from mezzo.record import Timing


def made(recipe: StaticRecipe, read_s: float, queued_s: float) -> StaticResult:
    return StaticResult(
        model="net",
        recipe=recipe,
        samples=10,
        build_s=1.0,
        timing=Timing((read_s,)),
        queued_s=queued_s,
        loss=2.0,
        peak_memory_bytes=2**30,
    )


def made_bench(*results: StaticResult) -> StaticBench:
    machine = MachineClocks(
        device="d", mem_clock="-", sm_clock="-", cpu_clocks="-", torch_version="t", driver_version="v"
    )
    settings = StaticSettings(
        device="cpu", size=1, batch_size=1, image_size=1, images=1, steps=1, models=("SimpleNet",)
    )
    return StaticBench(settings=settings, results=results, machine=machine)


def test_ratios_are_those_to_the_best_compiled_stock_recipe_of_the_same_kind() -> None:
    ours = made(StaticRecipe("mezzo", "O2"), 2.0, 1.0)
    result = made_bench(
        made(StaticRecipe("stock", "autocast"), 0.1, 0.1),  # not compiled: no rival
        made(StaticRecipe("stock", "autocast", "default"), 5.0, 1.5),
        made(StaticRecipe("stock", "autocast", "reduce-overhead"), 4.0, 1.6),
        made(StaticRecipe("stock", "autocast", "default", keeps_grads=True), 6.0, 3.0),
        ours,
    )
    assert result.speedup(ours, queued=False) == 2.0
    assert result.speedup(ours, queued=True) == 1.5
    assert result.speedup(ours, queued=False, keeps_grads=True) == 3.0
    assert made_bench(ours).speedup(ours, queued=True) is None
    row = dict(zip(result.table()[0], result.table()[-1], strict=True))
    assert row["x compiled stock, read / queued"] == "2.00 / 1.50"
    assert row["the same, grads kept"] == "3.00 / 3.00"
    assert row["samples/s, queued"] == "10"
    assert row["peak memory"] == "1.00 GiB"
    data = json.loads(json.dumps(result.to_dict()))["results"][-1]
    assert data["speedup_over_compiled_stock_queued"] == 1.5
    assert data["recipe"]["name"] == "mezzo O2 graph"


def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "static", "--steps", "0", "--device", "cpu"]) == 2
    assert "--steps 0: must be at least 1" in capsys.readouterr().err
    assert run(["bench", "static", "--model", "SimpleNett", "--device", "cpu"]) == 2
    assert "unknown --model 'SimpleNett'; did you mean 'SimpleNet'?" in capsys.readouterr().err


def test_each_of_our_recipes_trains_to_the_loss_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compilers: torch.compile is left out, graphs run as they are."""
    recipes = tuple(recipe for recipe in STATIC_RECIPES["SimpleNet"] if recipe.compile_mode is None)
    monkeypatch.setitem(STATIC_RECIPES, "SimpleNet", recipes)
    use_backend(monkeypatch, "aot_eager")
    result = bench_static(size=16, batch_size=8, steps=2, device="cpu")
    losses = {r.recipe.name: r.loss for r in result.results}
    assert list(losses) == [
        "stock float32",
        "stock autocast",
        "mezzo FP32 graph",
        "mezzo O1 graph",
        "mezzo O2 graph",
        "mezzo O2 graph, compact masters",
        "mezzo O2 guard graph",
    ]
    assert losses["mezzo FP32 graph"] == losses["stock float32"]
    for loss in losses.values():
        # a float16 product is right to 2**-12, and nine of them follow each other
        assert loss == pytest.approx(losses["stock float32"], rel=1e-3)


def test_mobilenet_is_trained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = (StaticRecipe("stock", "autocast"), StaticRecipe("mezzo", "O2", channels_last=True))
    monkeypatch.setitem(STATIC_RECIPES, "mobilenet_v3_small", recipes)
    use_backend(monkeypatch, "eager")
    result = bench_static(image_size=32, images=2, steps=1, models=("mobilenet_v3_small",), device="cpu")
    assert [r.samples for r in result.results] == [2, 2]
    assert all(r.loss > 0 for r in result.results)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor's own imports
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_compiler()
    assert run(["bench", "static", "--size", "16", "--batch-size", "8", "--steps", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "mezzo O2 guard graph" in text
    assert "stock autocast, torch.compile default, grads kept" in text
