"""`benchmarks/fp8.py` runs in all its parts, small, and judges as it says."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fp8.py"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_operands_shapes_and_products_are_compared_small(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "fp8.json"
    found = script.main(["--small", "--parts", "shapes,checks,emulation", "--json", str(file)])
    assert json.loads(file.read_text(encoding="utf-8"))["parts"].keys() == found["parts"].keys()
    parts = found["parts"]
    assert list(parts) == ["checks", "emulation", "shapes"]  # the order in which they mean most
    assert all(not part["left_out"] and not part["errors"] for part in parts.values())
    assert set(parts["checks"]["operands"].values()) == {"equal"}
    assert len(parts["emulation"]["products"]) == 16 * 3
    assert len(parts["shapes"]["cells"]) == 2 * 2 * 2


@pytest.mark.slow
def test_the_network_of_the_guide_is_trained_in_every_way_small(script: ModuleType) -> None:
    simple = script.main(["--small", "--parts", "simple"])["parts"]["simple"]
    rows = {row["name"]: row for row in simple["rows"]}
    assert simple["errors"] == simple["left_out"] == []
    assert len(rows) == 27
    # 64 wide on 32 samples: FP8 rounds 3 bits of mantissa, and a mean over 2,048 outputs leaves little of it.
    for row in rows.values():
        assert abs(row["loss_minus_float32"]) < 2e-2
        assert row["fall_ratio"] == pytest.approx(1.0, abs=0.1)
    assert rows["mezzo bfloat16 O3, current, fast forward"]["over_stock"] is not None
    assert "mezzo float16 O3, delayed, fast always, compact masters, captured" in rows
    assert rows["mezzo bfloat16 O2"]["loss"] != rows["mezzo bfloat16 O3, current, fast forward"]["loss"]
    assert sum(simple["kernel_shares"]["bfloat16"].values()) == pytest.approx(1.0)


def test_the_transformer_is_trained_with_every_seed_small(script: ModuleType) -> None:
    part = script.main(["--small", "--parts", "transformer"])["parts"]["transformer"]
    assert sorted(part["losses"]) == ["O2, seed 0", "O2, seed 1", "O2, seed 2", "O3, seed 0"]
    assert part["losses"]["O2, seed 0"] != part["losses"]["O3, seed 0"]
    assert part["errors"] == part["left_out"] == []
    assert part["verdict"]["is_within"]
    assert all(min(rates) > 0 for rates in part["tokens_per_s"].values())


def test_what_there_was_no_time_for_is_listed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    part = script.main(["--small", "--parts", "checks", "--budget", "0"])["parts"]["checks"]
    assert part["left_out"] == ["checks"]
    assert "left out, no time: checks" in capsys.readouterr().out


def test_a_goal_that_nothing_was_measured_for_is_missed(script: ModuleType) -> None:
    report = script.Report("part", 60.0)
    for text, answers in (("none", []), ("one of two", [True, False]), ("all", [True, True])):
        report.goal(text, answers)
    assert report.goals == {"none": False, "one of two": False, "all": True}


def test_a_failure_is_noted_and_costs_nothing_else(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time_shape = script.time_shape

    def fails_for_16(sizes: Any, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
        if inputs == 16:
            raise RuntimeError("no such product\nand more")
        return dict(time_shape(sizes, rows, inputs, outputs))

    monkeypatch.setattr(script, "time_shape", fails_for_16)
    part = script.main(["--small", "--parts", "shapes"])["parts"]["shapes"]
    assert part["errors"][0] == "16 rows, 16 -> 16: RuntimeError: no such product"
    assert len(part["errors"]) == len(part["cells"]) == 4
    assert "FAILED 16 rows, 16 -> 16: RuntimeError: no such product" in capsys.readouterr().out


def test_a_curve_is_judged_by_the_spread_of_seeds(script: ModuleType) -> None:
    flat = [2.0] * 40
    spread = [flat, [loss + 0.5 for loss in flat], [loss - 0.25 for loss in flat]]
    verdict = script.judge_curves(spread, [loss + 0.1 for loss in flat])
    assert verdict["largest_difference"] == pytest.approx(0.1)
    assert verdict["largest_spread"] == verdict["last_spread"] == pytest.approx(0.75)
    assert verdict["is_within"]
    rising = [2.0 + 0.05 * number for number in range(40)]  # smoothed, its end is 2 + 0.05 * 29.5
    outside = script.judge_curves(spread, rising)
    assert outside["last_difference"] == pytest.approx(0.05 * 29.5)
    assert not outside["is_within"]


def cell(rows: int, width: int, ratio: float) -> dict[str, Any]:
    return {"rows": rows, "inputs": width, "outputs": width, "half_graph_s": ratio, "fp8_graph_s": 1.0}


def test_fp8_wins_from_the_width_above_the_last_loss(script: ModuleType) -> None:
    cells = [cell(256, 512, 0.5), cell(256, 1024, 0.9), cell(256, 2048, 1.2)]
    cells += [cell(512, 512, 0.8), cell(512, 1024, 1.1), cell(512, 2048, 1.5)]
    # n -> n counts as n / 2; with 256 rows or more a layer of 1024 loses somewhere, with 512 none.
    assert script.wins_from(cells, "graph") == [(256, 1024.0), (512, 512.0)]
    assert script.wins_from([cell(256, 512, 0.5)], "graph") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--small", "--parts", "simple,speed"],
            "--parts speed: there are checks, emulation, simple, shapes, transformer",
        ),
        (["--parts", "checks"], "there is no GPU here; try --small"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    script: ModuleType,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
