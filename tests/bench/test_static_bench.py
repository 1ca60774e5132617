"""`mezzo bench static`: what is measured, and what is made of it."""

import importlib.util
import json
from dataclasses import replace

import pytest

from graph_backends import skip_without_compiler, use_backend
from mezzo.bench import (
    STATIC_RECIPES,
    MachineClocks,
    NotRun,
    StaticBench,
    StaticRecipe,
    StaticResult,
    StaticSettings,
    bench_static,
)
from mezzo.bench._profile import KernelShare
from mezzo.bench._static_recipes import choose_recipes
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


def made_bench(*results: StaticResult, not_run: tuple[NotRun, ...] = ()) -> StaticBench:
    machine = MachineClocks(
        device="d", mem_clock="-", sm_clock="-", cpu_clocks="-", torch_version="t", driver_version="v"
    )
    settings = StaticSettings(device="cpu", size=1, simple_net_batch=1, steps=1, models=("SimpleNet",))
    return StaticBench(settings=settings, results=results, machine=machine, not_run=not_run)


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
    assert row["x compiled stock"] == "2.00 / 1.50"
    assert row["x compiled stock, grads kept"] == "3.00 / 3.00"
    assert row["x best stock, read / queued"] == "0.05 / 0.10"
    assert row["rate, queued"] == "10 samples/s"
    assert row["peak memory"] == "1.00 GiB"
    data = json.loads(json.dumps(result.to_dict()))["results"][-1]
    assert data["speedup_over_compiled_stock_queued"] == 1.5
    assert data["speedup_over_best_stock_queued"] == 0.1
    assert (data["best_stock"], data["samples_per_s"]) == ("stock autocast", 10.0)
    assert data["recipe"]["name"] == "mezzo O2 graph"


def test_the_best_stock_recipe_is_that_of_the_same_model_eager_too() -> None:
    ours = made(StaticRecipe("mezzo", "O2"), 2.0, 1.0)
    other = replace(made(StaticRecipe("stock", "autocast"), 0.5, 0.5), model="another")
    eager = made(StaticRecipe("stock", "autocast"), 3.0, 5.0)
    compiled = made(StaticRecipe("stock", "autocast", "default"), 4.0, 2.0)
    result = made_bench(other, eager, compiled, ours)
    assert result.best_stock("net") is compiled
    assert result.best_stock("net", queued=False) is eager
    assert result.speedup_over_best(ours, queued=True) == 2.0
    assert result.speedup_over_best(ours, queued=False) == 1.5
    assert made_bench(ours).speedup_over_best(ours, queued=True) is None


def test_a_profile_is_a_second_table_by_kind_of_kernel() -> None:
    kernels = (
        KernelShare("nvjet_hsh_64x8", "products", 2.0, 3e-3),
        KernelShare("triton_poi_fused_add_0", "pointwise", 4.0, 5e-4),
        KernelShare("triton_poi_fused_mul_1", "pointwise", 1.0, 5e-4),
    )
    plain, profiled = made(StaticRecipe("stock", "autocast"), 2.0, 1.0), made(StaticRecipe("mezzo", "O2"), 2.0, 1.0)
    result = made_bench(plain, replace(profiled, kernels=kernels))
    _, (header, row) = result.tables()
    assert dict(zip(header, row, strict=True)) == {
        "model": "net",
        "recipe": "mezzo O2 graph",
        "on the GPU": "4.00 ms",
        "pointwise": "1.00 ms in 5",
        "products": "3.00 ms in 2",
    }
    assert result.results[1].slowest_kernels(2) == [
        "      3.000 ms     2.0 x nvjet_hsh_64x8",
        "      0.500 ms     4.0 x triton_poi_fused_add_0",
    ]
    assert json.loads(json.dumps(result.to_dict()))["results"][1]["kernels"][0]["name"] == "nvjet_hsh_64x8"
    assert len(made_bench(plain).tables()) == 1


def test_a_recipe_that_was_not_run_is_named_with_its_reason() -> None:
    recipe = StaticRecipe("stock", "autocast", "reduce-overhead")
    missing = NotRun(model="net", recipe=recipe, reason="over the budget of 3 s", is_failure=False)
    header, first, last = made_bench(made(StaticRecipe("mezzo", "O2"), 1.0, 1.0), not_run=(missing,)).table()
    assert len(header) == len(first) == len(last)
    assert last[:3] == ["net", recipe.name, "not run: over the budget of 3 s"]
    only = made_bench(not_run=(missing,))
    assert only.table()[1] == last[:3]
    assert json.loads(json.dumps(only.to_dict()))["not_run"][0]["reason"] == "over the budget of 3 s"


def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "static", "--steps", "0", "--device", "cpu"]) == 2
    assert "--steps 0: must be at least 1" in capsys.readouterr().err
    assert run(["bench", "static", "--model", "SimpleNett", "--device", "cpu"]) == 2
    assert "unknown --model 'SimpleNett'; did you mean 'SimpleNet'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model pp_litesegstdc1", "did you mean 'pp_liteseg_stdc1'?"),
        ("--model transformers:gpt3", "unknown --model 'transformers:gpt3'; did you mean 'transformers:gpt2'?"),
        ("--recipes mezo-graph", "unknown --recipes 'mezo-graph'; did you mean 'mezzo-graph'?"),
        ("--recipes stock-eager-channels-last", "SimpleNet has none of them; allowed: stock, stock-eager"),
        ("--image-size 3x4x5", "must be a side, as 224, or height and width, as 512x1024"),
        ("--image-size 0", "--image-size 0x0: must be at least 1"),
        ("--budget 0", "--budget 0: must be above 0 seconds"),
        ("--warm-caches -1", "--warm-caches -1: must be at least 0"),
        ("--check-steps 0", "--check-steps 0: must be at least 1"),
        ("--dtype float8", "unknown --dtype 'float8'; did you mean 'float16'?"),
        ("--model timm:resnet50", "this command needs timm: pip install 'mezzo[bench]'"),
        ("--model transformers:gpt2", "this command needs transformers: pip install 'mezzo[bench]'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    hidden = ("timm", "transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
    assert run(["bench", "static", "--device", "cpu", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_share_of_the_devices_rate_is_operations_over_time_and_rate() -> None:
    result = replace(made(StaticRecipe("mezzo", "O2"), 1.0, 0.5), flops=9.89e13)
    bench = made_bench(result)
    bench = replace(bench, machine=replace(bench.machine, device="NVIDIA H200"))
    assert bench.utilisation(result) == pytest.approx(0.2)  # 989e12 a second
    assert dict(zip(*bench.table(), strict=True)) | {"TFLOP/s": "198", "MFU": "20.0%"} == dict(
        zip(*bench.table(), strict=True)
    )
    assert made_bench(result).utilisation(result) is None, "the rate of this device is not known"
    assert "MFU" not in made_bench(made(StaticRecipe("mezzo", "O2"), 1.0, 0.5)).table()[0]


def test_bfloat16_weights_are_no_rival_because_they_lose_small_updates() -> None:
    masters = made(StaticRecipe("stock", "autocast", "default"), 2.0, 2.0)
    without = made(StaticRecipe("stock", "bf16 weights", "default"), 1.0, 1.0)
    assert made_bench(masters, without).best_stock("net") == masters


def test_recipes_of_language_models_have_words_of_their_own() -> None:
    def chosen(*words: str) -> list[str]:
        return [each.name for each in choose_recipes("llm", "net", words)]

    assert chosen("mezzo-graph") == [
        "mezzo O2 graph",
        "mezzo O2 graph, compact masters",
        "mezzo O2 graph, compact masters, bfloat16 state",
        "mezzo O2 graph, compact masters, saving memory",
    ]
    assert chosen("mezzo-graph-compact-state") == ["mezzo O2 graph, compact masters, bfloat16 state"]
    assert chosen("mezzo-o3-graph") == [
        "mezzo O3 graph",
        "mezzo O3 graph, compact masters",
        "mezzo O3 graph, delayed scales, compact masters",
        "mezzo O3 graph, row scales, compact masters",
    ]
    assert chosen("mezzo-o3-graph-plain", "mezzo-graph-compact") == [
        "mezzo O2 graph, compact masters",
        "mezzo O3 graph",
    ]
    assert chosen("mezzo-o3-graph-row-compact") == ["mezzo O3 graph, row scales, compact masters"]
    assert chosen("stock-bf16-compile", "torchao") == [
        "stock bf16 weights, torch.compile default",
        "torchao float8, torch.compile default",
    ]


def test_words_choose_recipes_in_one_layout_or_in_all() -> None:
    def chosen(kind: str, *words: str) -> list[str]:
        return [each.name for each in choose_recipes(kind, "net", words)]

    graphs = ["mezzo O2 graph", "mezzo O2 graph, channels-last"]
    assert chosen("images", "mezzo-graph") == graphs
    assert chosen("images", "mezzo-graph-contiguous") == graphs[:1]
    assert chosen("images", "mezzo-graph-channels-last") == graphs[1:]
    assert chosen("images", "mezzo-eager", "stock-reduce-overhead-channels-last") == [
        "stock autocast, torch.compile reduce-overhead, channels-last",
        "mezzo O2",
        "mezzo O2, channels-last",
    ]
    assert chosen("tokens", "mezzo") == ["mezzo O2", "mezzo O2 graph"]
    stock = ["stock autocast", *(f"stock autocast, torch.compile {mode}" for mode in ("default", "reduce-overhead"))]
    assert chosen("tokens", "stock") == stock
    assert [each.name for each in choose_recipes("images", "net", None) if each.by == "stock"] == [
        name + layout for name in stock for layout in ("", ", channels-last")
    ]


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
    use_backend(monkeypatch, "eager")
    result = bench_static(
        image_size=32,
        images=2,
        steps=1,
        check_steps=2,
        models=("mobilenet_v3_small",),
        recipes=("stock-eager-contiguous", "mezzo-graph-channels-last"),
        device="cpu",
    )
    assert [r.samples for r in result.results] == [2, 2]
    assert [r.shape for r in result.results] == [(2, 3, 32, 32)] * 2
    assert all(r.loss > 0 for r in result.results)


@pytest.mark.slow
def test_recipes_are_built_at_the_same_time_and_measured_in_turn() -> None:
    found: list[str] = []
    result = bench_static(
        size=16,
        batch_size=8,
        steps=2,
        check_steps=2,
        recipes=("stock-eager",),
        at_once=2,
        kernels=3,
        device="cpu",
        finished=lambda each: found.append(str(each)),
    )
    assert [r.recipe.name for r in result.results] == ["stock float32", "stock autocast"]
    assert len(found) == 2
    assert all(each.kernels == () for each in result.results), "a CPU has no kernels to profile"


def test_numbers_of_processes_and_kernels_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="--at-once -1"):
        bench_static(at_once=-1, device="cpu")
    with pytest.raises(ValueError, match="--kernels -1"):
        bench_static(kernels=-1, device="cpu")


def test_the_check_reports_scale_and_skipped_steps() -> None:
    """SimpleNet of 16 with uniform numbers cannot overflow; a first scale of 2**15 of mezzo, 2**16 of torch stays."""
    result = bench_static(
        size=16, batch_size=8, steps=1, check_steps=3, recipes=("stock-eager",), dtype="fp16", device="cpu"
    )
    assert [(r.dtype, r.scale, r.skipped) for r in result.results] == [("float32", None, 0), ("float16", 2.0**16, 0)]
    (_, half) = bench_static(
        size=16, batch_size=8, steps=1, check_steps=3, recipes=("stock-eager",), dtype="bfloat16", device="cpu"
    ).results
    assert (half.dtype, half.scale, half.skipped) == ("bfloat16", None, 0)


@pytest.mark.slow
def test_a_zoo_network_trains_eager_and_as_a_graph_to_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "aot_eager")
    result = bench_static(
        models=("pp_liteseg_t",),
        image_size=(128, 192),  # at 64x96 the coarsest batch norms see 12 values, and noise decides
        batch_size=2,
        steps=1,
        check_steps=12,
        recipes=("stock-eager", "mezzo"),
        dtype="bfloat16",
        device="cpu",
    )
    assert [r.recipe.name for r in result.results] == [
        "stock autocast",
        "stock autocast, channels-last",
        "mezzo O2",
        "mezzo O2, channels-last",
        "mezzo O2 graph",
        "mezzo O2 graph, channels-last",
    ]
    first, *others = (r.loss for r in result.results)
    # three heads with 19 classes start at 3 log(19) = 8.8
    assert first < 8.5
    for loss in others:
        # bfloat16 has 8 bits, and twelve steps of a new network drift apart
        assert loss == pytest.approx(first, rel=0.05)


@pytest.mark.slow
def test_recipes_run_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench static --model mobilenet_v3_small --image-size 32 --images 2 --steps 1 --check-steps 2 --device cpu"
    more = "--recipes stock-eager-contiguous,mezzo-eager-contiguous --isolate --warm-caches 2 --json"
    assert run([*words.split(), *more.split()]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [each["recipe"]["name"] for each in data["results"]] == ["stock autocast", "mezzo O2"]
    assert all(each["cold_build_s"] > 0 for each in data["results"])
    assert data["not_run"] == []


def test_a_recipe_over_its_budget_is_named_and_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench static --size 16 --batch-size 8 --steps 1 --device cpu --recipes stock-eager --budget 0.000001"
    assert run(words.split()) == 0  # the user set the budget: no failure
    assert capsys.readouterr().out.count("not run: over the budget of 1e-06 s") == 2


def test_a_recipe_that_fails_alone_is_named_and_the_command_fails(capfd: pytest.CaptureFixture[str]) -> None:
    # BatchNorm needs two values a channel
    words = "bench static --model mobilenet_v3_small --image-size 1 --images 1 --device cpu"
    assert run([*words.split(), "--recipes", "stock-eager-contiguous", "--isolate"]) == 1
    printed = capfd.readouterr()
    assert "not run: ValueError: Expected more than 1 value per channel" in printed.out
    assert "Traceback" in printed.err


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_compiler()
    assert run(["bench", "static", "--size", "16", "--batch-size", "8", "--steps", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "mezzo O2 guard graph" in text
    assert "stock autocast, torch.compile default, grads kept" in text
