"""A newcomer's path, docs/tutorial.md from top to bottom in an empty folder: trains, proves, compiles, exports, runs."""

import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_pages import DOCS, ROOT, blocks

TUTORIAL = DOCS / "tutorial.md"
# Float32 against float32: other kernels add in another order; probabilities are at most 1, and float32 has 24 bits.
ATOL_FP32 = 1e-5
# Half weights and activations, 11 bits, through four layers.
ATOL_FP16 = 2e-2


#: Inductor's own imports warn.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What the page leaves: its names, what it printed, and its folder."""
    import contextlib
    import io

    folder = tmp_path_factory.mktemp("newcomer")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for block in blocks(TUTORIAL):
            if block.language == "python":
                exec(block.code, names)  # noqa: S102  # our own text
    return names, printed.getvalue(), folder


@pytest.mark.slow
def test_the_network_has_learnt_and_kept_float32_masters(path: tuple[dict[str, Any], str, Path]) -> None:
    names, printed, _ = path
    losses = dict(re.findall(r"^(fp32|fp16 O2|bf16 O2): loss ([\d.]+)", printed, re.MULTILINE)[:3])
    for name in ("fp32", "fp16 O2", "bf16 O2"):
        assert float(losses[name]) < 0.6 * math.log(3), name  # ln 3 is the loss of a guess
    assert names["model"][0].weight.dtype is torch.float16
    assert names["model"].state_dict()["0.weight"].dtype is torch.float32


@pytest.mark.slow
def test_half_predicts_as_well_as_float32_and_the_layer_kept_is_float32(
    path: tuple[dict[str, Any], str, Path],
) -> None:
    names, printed, _ = path
    found = re.search(r"^float32 ([\d.]+), O2 ([\d.]+)$", printed, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > 0.8
    assert float(found[2]) == pytest.approx(float(found[1]), abs=0.03)  # of 1000 images, some stand on the border
    assert [layer.weight.dtype for layer in (names["partly"][0], names["partly"][7])] == [torch.float16, torch.float32]


@pytest.mark.slow
def test_the_resumed_network_goes_on_in_a_compiled_step(path: tuple[dict[str, Any], str, Path]) -> None:
    names, printed, _ = path
    assert "compiled: " in printed
    assert "as written: " in printed
    assert names["loss"].item() < 0.6 * math.log(3)


@pytest.mark.slow
def test_the_table_shows_half(path: tuple[dict[str, Any], str, Path]) -> None:
    names, printed, _ = path
    assert "op list" in printed
    by_call = {row.api_op: row for row in names["stats"].rows if row.op != "_to_copy"}
    for call in ("conv2d", "linear", "relu", "batch_norm"):
        assert (by_call[call].fp16 > 0, by_call[call].fp32) == (True, 0), call
    assert by_call["cross_entropy"].fp32 > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the table on the page is that of a CPU")
def test_the_table_on_the_page_is_the_one_that_is_printed(path: tuple[dict[str, Any], str, Path]) -> None:
    (shown,) = [block.code for block in blocks(TUTORIAL) if block.language == "text"]
    of_network = ("addmm", "convolution", "native_batch_norm", "relu", "nll_loss_forward", "_log_softmax")
    for name in of_network:
        (line,) = [line for line in shown.splitlines() if line.split()[0] == name]
        assert line.rstrip() in [printed.rstrip() for printed in path[1].splitlines()]


@pytest.mark.slow
def test_exported_files_give_what_the_network_gives(path: tuple[dict[str, Any], str, Path]) -> None:
    from mezzo.export import EngineOptions, load_engine, read_deployed

    names, _, folder = path
    fresh: dict[str, Any] = {}
    exec(next(block.code for block in blocks(TUTORIAL) if block.language == "python"), fresh)  # noqa: S102  # ours
    network = fresh["build_model"]().cpu().double().eval()
    network.load_state_dict(names["model"].state_dict())
    with torch.inference_mode():
        expected = network(names["images"].cpu().double()).softmax(dim=1).numpy()
    assert np.ptp(expected.max(axis=1)) > 0.1, "probabilities that are all alike would prove nothing"
    for given in (names["probabilities"], names["again"]):
        np.testing.assert_allclose(given, expected, rtol=0, atol=ATOL_FP32)
    deployed = read_deployed(folder / "exported")
    for engine in ("torch", "onnxruntime"):
        half, _ = load_engine(deployed, EngineOptions(precision="fp16"), engine)
        np.testing.assert_allclose(half.run(names["inputs"]), expected, rtol=0, atol=ATOL_FP16)


@pytest.mark.slow
def test_every_check_of_the_export_is_printed_and_fine(path: tuple[dict[str, Any], str, Path]) -> None:
    names, printed, folder = path
    report = names["report"]
    assert all(check.is_fine for check in report.checks)
    assert all(str(check) in printed for check in report.checks)
    assert {(check.precision, check.engine) for check in report.checks} == {
        (precision, engine) for precision in ("fp32", "fp16") for engine in ("torch", "onnxruntime")
    }
    made = {path.name for path in (folder / "exported").iterdir()}
    assert made >= {"model.pt2", "model.onnx", "model_fp16.pt2", "model_fp16.onnx", "deploy.yaml"}


def test_the_first_half_of_the_path_trains_and_shows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(TUTORIAL):
        if block.language == "python" and "precision.compile(" in block.code:
            break  # what follows takes longer: test_newcomer's slow tests run it
        if block.language == "python":
            exec(block.code.replace("steps=60", "steps=8"), names)  # noqa: S102  # our own text
    assert "op list" in capsys.readouterr().out
    assert names["model"][0].weight.dtype is torch.float16
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_measurement_times_what_the_page_has() -> None:
    timed = "\n".join(runpy.run_path(str(ROOT / "benchmarks" / "newcomer.py"))["sections"]().values())
    for block in blocks(TUTORIAL):
        if block.language == "python":
            assert block.code in timed
