"""Engines by name, and the fastest one that agrees."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mezzo.devices import DeviceError
from mezzo.errors import OptionError, RunError
from mezzo.export import ENGINES, Deployed, EngineError, EngineOptions, difference, load_engine
from mezzo.export import _choose as chooser
from mezzo.export._engine import PerShape

SHAPE = (1, 3, 24, 32)
IMAGES = np.random.default_rng(1).standard_normal(SHAPE, dtype=np.float32)


class Fake:
    """An engine that takes its time and adds to the labels."""

    def __init__(self, seconds: float, wrong: int = 0) -> None:
        self._seconds, self._wrong = seconds, wrong

    def __call__(self, model: Deployed, options: EngineOptions) -> "Fake":
        return self

    def run(self, images: Any) -> Any:
        import time

        time.sleep(self._seconds)
        return np.zeros(images.shape[2:], np.int32) + self._wrong


@pytest.fixture
def copied(segmenter: Deployed, tmp_path: Path) -> Deployed:
    for path in segmenter.folder.iterdir():
        if path.name != chooser.FILE:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return replace(segmenter, folder=tmp_path)


@pytest.mark.parametrize("name", ["onnxruntime", "torch", "openvino"])
def test_engines_agree(name: str, segmenter: Deployed) -> None:
    pytest.importorskip(name)
    right = load_engine(segmenter, EngineOptions(), "torch")[0].run(IMAGES)
    engine, choice = load_engine(segmenter, EngineOptions(threads=1), name)
    assert difference(engine.run(IMAGES), right) < 2e-3  # labels at a border between classes
    assert choice.engine == name


def test_the_cpu_has_onnx_runtime_and_a_gpu_graphs() -> None:
    assert chooser.default_engine(EngineOptions()) == "onnxruntime"
    assert chooser.default_engine(EngineOptions(device="cuda:1")) == "torch-graph"


def test_auto_takes_the_fastest_that_agrees_and_remembers(copied: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: replace(kind) for name, kind in ENGINES.items() if name in ("onnxruntime", "openvino", "torch")}
    made = {"onnxruntime": Fake(0.002), "openvino": Fake(0.0, wrong=1), "torch": Fake(0.01)}
    monkeypatch.setattr(chooser, "ENGINES", kinds)
    monkeypatch.setattr(chooser.EngineKind, "make", lambda kind, model, options: made[kind.package])
    _, choice = load_engine(copied, EngineOptions(), "auto", SHAPE)
    assert (choice.engine, choice.is_remembered) == ("onnxruntime", False)
    assert "but its output differs by 1" in choice.tried["openvino"]
    made["torch"] = Fake(0.0)
    _, again = load_engine(copied, EngineOptions(), "auto", SHAPE)
    assert (again.engine, again.is_remembered) == ("onnxruntime", True)
    _, other = load_engine(copied, EngineOptions(threads=2), "auto", SHAPE)
    assert (other.engine, other.is_remembered) == ("torch", False)


def test_auto_works_with_what_is_installed(copied: Deployed) -> None:
    engine, choice = load_engine(copied, EngineOptions(threads=1), "auto", SHAPE)
    assert engine.run(IMAGES).shape == (1, 24, 32)
    assert choice.tried["onnxruntime"].endswith(" ms")
    assert choice.engine in ENGINES


@pytest.mark.parametrize("stored", ["", "[1]", '{"x": 3}', "\xff", "[" * 100_000])
def test_a_damaged_memory_counts_as_none(stored: str, copied: Deployed) -> None:
    (copied.folder / chooser.FILE).write_text(stored, encoding="latin-1")
    _, choice = load_engine(copied, EngineOptions(threads=1), "auto", SHAPE)
    assert not choice.is_remembered
    assert len(json.loads((copied.folder / chooser.FILE).read_text())) >= 1


def test_no_engine_at_all_says_why_for_each(copied: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kind: chooser.EngineKind, model: Deployed, options: EngineOptions) -> Any:
        if kind.package == "torch" and options == EngineOptions():
            return Fake(0)
        raise EngineError(f"{kind.package} is broken")

    monkeypatch.setattr(chooser.EngineKind, "make", broken)
    with pytest.raises(
        RunError, match="no engine works: onnxruntime: onnxruntime is broken; openvino: openvino is bro"
    ):
        chooser.choose(copied, EngineOptions(precision="fp16"), SHAPE)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "onnxrt",
            {},
            "unknown engine 'onnxrt'; did you mean 'onnxruntime'? allowed: auto, onnxruntime, openvino, torch-graph",
        ),
        ("tensorrt", {}, "there is no TensorRT engine in mezzo; on a GPU use --engine torch-graph"),
        ("torch-graph", {}, "torch-graph replays CUDA graphs: it needs --device gpu; on the CPU use onnxruntime"),
        ("openvino", {"device": "cuda:0"}, "OpenVINO works on the CPU here; for a GPU use --engine torch-graph"),
        ("torch-aoti", {"device": "cuda:0"}, "torch-aoti works on the CPU here; for a GPU use --engine torch-graph"),
        ("torch", {"device": "cuda:99"}, "device cuda:99: "),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(
    name: str, options: dict[str, Any], message: str, segmenter: Deployed
) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    with pytest.raises((EngineError, DeviceError)) as error:
        load_engine(segmenter, EngineOptions(**options), name)
    assert message in str(error.value)


def test_onnx_runtime_for_the_cpu_names_the_other_package(segmenter: Deployed) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(
        EngineError, match="this onnxruntime works on the CPU only: pip install onnxruntime-gpu, or use"
    ):
        load_engine(segmenter, EngineOptions(device="cuda:0"), "onnxruntime")


def test_a_missing_package_says_what_to_install(segmenter: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        EngineError, match=r"this engine needs openvino, which is not installed: pip install 'mezzo\[ope"
    ):
        load_engine(segmenter, EngineOptions(), "openvino")


def test_a_compiler_is_needed_for_aoti(segmenter: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineError, match=r"torch-aoti needs a C\+\+ compiler: install g\+\+ or name one in CXX"):
        load_engine(segmenter, EngineOptions(), "torch-aoti")


def test_a_damaged_onnx_file_is_one_line(copied: Deployed) -> None:
    from mezzo.export import sha256

    (copied.folder / "model.onnx").write_bytes(b"rubbish")
    damaged = replace(copied, files={**copied.files, "model.onnx": sha256(copied.folder / "model.onnx")})
    with pytest.raises(EngineError, match=r"model.onnx: ONNX Runtime cannot load it: "):
        load_engine(damaged, EngineOptions(), "onnxruntime")
    if ENGINES["openvino"] and chooser.version_of("openvino"):
        with pytest.raises(EngineError, match=r"model.onnx: OpenVINO cannot compile it for \(1, 3, 24, 32\): "):
            load_engine(damaged, EngineOptions(), "openvino")[0].run(IMAGES)


@pytest.mark.parametrize("name", ["onnxruntime", "torch", "openvino"])
def test_any_array_of_images_is_taken(name: str, segmenter: Deployed) -> None:
    pytest.importorskip(name)
    engine, _ = load_engine(segmenter, EngineOptions(), name)
    right = engine.run(IMAGES)
    turned = np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    locked = IMAGES.copy()
    locked.setflags(write=False)
    for images in (turned, locked, IMAGES.astype(np.float64)):
        assert np.array_equal(engine.run(images), right)


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_what_fails_while_running_is_one_line(name: str, segmenter: Deployed) -> None:
    engine, _ = load_engine(segmenter, EngineOptions(), name)
    with pytest.raises(RunError, match=r"cannot run images of \(1, 5, 8, 8\): "):
        engine.run(np.zeros((1, 5, 8, 8), np.float32))


def test_threads_are_those_of_the_engine_that_runs(segmenter: Deployed) -> None:
    import torch

    one, _ = load_engine(segmenter, EngineOptions(threads=1), "torch")
    two, _ = load_engine(segmenter, EngineOptions(threads=2), "torch")
    one.run(IMAGES)
    assert torch.get_num_threads() == 1
    two.run(IMAGES)
    assert torch.get_num_threads() == 2


def test_threads_below_zero_are_refused() -> None:
    with pytest.raises(OptionError, match="threads=-1"):
        EngineOptions(threads=-1)


def test_only_the_last_few_shapes_are_kept() -> None:
    made: list[tuple[int, ...]] = []

    def prepare(shape: tuple[int, ...]) -> int:
        made.append(shape)
        return len(made)

    kept = PerShape(prepare, most=2)
    assert [kept.get((n,)) for n in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Inductor warns about torch's own use of torch.jit
@pytest.mark.parametrize("name", ["torch-compiled", "torch-aoti"])
def test_compiled_engines_agree(
    name: str, segmenter: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    right = load_engine(segmenter, EngineOptions(), "torch")[0].run(IMAGES)
    assert difference(load_engine(segmenter, EngineOptions(), name)[0].run(IMAGES), right) < 2e-3
    if name == "torch-aoti":
        (package,) = (tmp_path / "mezzo" / "aoti").iterdir()
        written = package.stat().st_mtime_ns
        load_engine(segmenter, EngineOptions(), name)
        assert package.stat().st_mtime_ns == written


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["torch", "torch-graph"])
def test_engines_agree_on_a_gpu(name: str, precision: str, segmenter: Deployed) -> None:
    right = load_engine(segmenter, EngineOptions(), "torch")[0].run(IMAGES)
    engine, _ = load_engine(segmenter, EngineOptions(device="cuda:0", precision=precision), name)
    for shape in (SHAPE, (2, 3, 40, 40), SHAPE):
        assert engine.run(np.zeros(shape, np.float32)).shape == (shape[0], *shape[2:])
    assert difference(engine.run(IMAGES), right) < (2e-3 if precision == "fp32" else 0.05)


@pytest.mark.gpu
def test_half_without_a_half_export_runs_under_auto_cast(classifier: Deployed) -> None:
    images = np.random.default_rng(0).standard_normal((2, 3, 24, 24), dtype=np.float32)
    right = load_engine(classifier, EngineOptions(), "torch")[0].run(images)
    for name in ("torch", "torch-graph"):
        engine, _ = load_engine(classifier, EngineOptions(device="cuda:0", precision="fp16"), name)
        output = engine.run(images)
        assert output.dtype == np.float32
        assert 0 < np.abs(output - right).max() < 5e-3  # in half, and near


def test_a_memory_that_is_a_link_is_not_written_through(copied: Deployed, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not JSON")
    (copied.folder / chooser.FILE).unlink(missing_ok=True)
    (copied.folder / chooser.FILE).symlink_to(precious)
    _, choice = load_engine(copied, EngineOptions(threads=1), "auto", SHAPE)
    assert choice.engine in ENGINES
    assert precious.read_text() == "not JSON"
