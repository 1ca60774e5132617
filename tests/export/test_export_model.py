"""A network becomes a folder: verified, put in place whole, and loadable without its source."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import MezzoError, OptionError, RunError
from mezzo.export import (
    Deployed,
    Description,
    EngineOptions,
    ExportError,
    ExportOptions,
    export_model,
    load_engine,
    read_deployed,
    verify,
)
from mezzo.export._network import Deployable
from mezzo.export._verify import MAX_ERROR, distance, own_rounding
from mezzo.vision.infer import find_images, read_batches
from tiny_nets import TinySegmenter, tiny_segmenter

DESCRIBED = Description(task="segmentation", model_name="net", num_classes=2, transforms=({"type": "Normalize"},))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.conv(x)
        return logits


def test_files_say_what_they_are(segmenter: Deployed) -> None:
    # engine.json is written by tests that let an engine be chosen
    assert sorted({path.name for path in segmenter.folder.iterdir()} - {"engine.json"}) == [
        "deploy.yaml", "model.onnx", "model.pt2", "model_bf16.pt2", "model_fp16.onnx", "model_fp16.pt2",
    ]  # fmt: skip
    again = read_deployed(segmenter.folder / "deploy.yaml")
    assert again == segmenter
    assert (again.output_op, again.input_shape, again.made_by["torch"]) == (
        "argmax",
        (-1, 3, -1, -1),
        torch.__version__,
    )


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("shape", [(1, 3, 24, 32), (3, 3, 33, 47)])
def test_labels_are_those_of_the_network(engine: str, shape: tuple[int, ...], segmenter: Deployed) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        logits = tiny_segmenter()(x)[0]
    output = load_engine(segmenter, EngineOptions(), engine)[0].run(x.numpy())
    assert output.dtype == np.int32
    assert distance(torch.from_numpy(output), logits, "argmax") < 1e-5


def test_no_place_of_this_machine_is_in_the_files(segmenter: Deployed) -> None:
    here = str(Path(__file__).parents[2]).encode()
    with zipfile.ZipFile(segmenter.folder / "model.pt2") as archive:
        assert not any(here in archive.read(name) for name in archive.namelist())
    assert here not in (segmenter.folder / "model.onnx").read_bytes()


def test_onnx_has_names_for_what_is_free(segmenter: Deployed) -> None:
    import onnx

    graph = onnx.load(segmenter.folder / "model.onnx").graph
    dims = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    assert (graph.input[0].name, dims, graph.output[0].name) == ("images", ["batch", 3, "height", "width"], "output")


def test_a_fixed_shape_stays_fixed(tmp_path: Path) -> None:
    model = export_model(Net(), DESCRIBED, ExportOptions(save_dir=tmp_path, input_shape=(1, 3, 16, 24))).model
    engine, _ = load_engine(model, EngineOptions(), "onnxruntime")
    assert engine.run(np.zeros((1, 3, 16, 24), np.float32)).shape == (1, 16, 24)
    assert model.input_shape == (1, 3, 16, 24)


def test_a_wrong_file_is_noticed_and_nothing_is_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = export_model(Net(), DESCRIBED, ExportOptions(save_dir=tmp_path)).model
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    from mezzo.export import _run

    def other(network: nn.Module, *rest: object) -> Deployable:
        changed = Deployable(network, *rest)  # type: ignore[arg-type]
        with torch.no_grad():
            changed.network.conv.weight[0] += 0.5  # type: ignore[index,union-attr]
        return changed

    made: list[object] = []

    def first_right(network: nn.Module, *rest: object) -> Deployable:
        made.append(rest)
        return (other if len(made) > 1 else Deployable)(network, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(_run, "Deployable", first_right)
    with pytest.raises(
        RunError, match=r"nothing was exported: 6 of 6 checks failed, first fp32 torch +random 1x3x96x128"
    ):
        export_model(Net(), DESCRIBED, ExportOptions(save_dir=tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert read_deployed(tmp_path) == first


def test_a_network_that_fixes_its_size_says_so(tmp_path: Path) -> None:
    class Fixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if x.shape[2] == 192 else 2)

    with pytest.raises(RunError, match=r"the network cannot be exported for input \[-1, 3, -1, -1\]: .*192"):
        export_model(Fixed(), DESCRIBED, ExportOptions(save_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_int8_agrees_on_real_images(tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = Net()
    options = ExportOptions(save_dir=tmp_path / "out", precisions=("int8",), min_agreement=0.9)
    said: list[str] = []
    report = export_model(
        network, DESCRIBED, options, images=find_images(pictures), read_images=read_batches, say=said.append
    )
    (check,) = [check for check in report.checks if check.precision == "int8"]
    assert check.agreement > 0.95  # 7 bits of weights, 8 of activations
    assert check.inputs == "3 real images"
    assert any("same class" in line and line.startswith("int8 onnxruntime") for line in said)
    assert report.model.variants["int8"] == {"onnx": "model_int8.onnx"}
    import onnx

    kinds = {node.op_type for node in onnx.load(tmp_path / "out" / "model_int8.onnx").graph.node}
    assert "QuantizeLinear" in kinds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": ("fp61",)}, "'fp61'; did you mean 'fp16'? allowed: fp32, fp16, bf16, int8"),
        (
            {"input_shape": (1, 3, 0, 5)},
            "input_shape=[1, 3, 0, 5]: must be batch, channels, height, width; -1 where it",
        ),
        ({"min_agreement": 1.5}, "min_agreement=1.5: must be between 0 and 1"),
        ({"calibration_images": 0}, "calibration_images=0: must be at least 1"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises((ExportError, OptionError)) as error:
        ExportOptions(save_dir=tmp_path, **options)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_programs_alone_need_no_onnx(tmp_path: Path) -> None:
    model = export_model(Net(), DESCRIBED, ExportOptions(save_dir=tmp_path, with_onnx=False)).model
    assert model.variants == {"fp32": {"program": "model.pt2"}}
    with pytest.raises(ExportError, match="int8 is made from ONNX: leave --no-onnx out"):
        ExportOptions(save_dir=tmp_path, precisions=("int8",), with_onnx=False)


def test_pooling_is_exported_for_sizes_of_any_remainder(tmp_path: Path) -> None:
    """Torch 2.11 guards the remainder that the sample has."""

    class Pooled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.max_pool2d(x[:, :, 1:], 3, stride=2, padding=1))

    model = export_model(Pooled(), DESCRIBED, ExportOptions(save_dir=tmp_path, with_onnx=False)).model
    engine, _ = load_engine(model, EngineOptions(), "torch")
    for size in (16, 17, 18, 19, 20):
        assert engine.run(np.zeros((1, 3, size, size), np.float32)).shape[1:] == (size // 2, -(-size // 2))


def test_a_network_that_needs_even_sizes_is_exported_for_those(tmp_path: Path) -> None:
    class Even(Net):
        def forward(self, x: Tensor) -> Tensor:
            n, c, height, width = x.shape
            blocks = x.reshape(n, c, height // 2, 2, width // 2, 2).mean((3, 5))
            return super().forward(nn.functional.interpolate(blocks, size=(height, width)))

    said: list[str] = []
    report = export_model(Even(), DESCRIBED, ExportOptions(save_dir=tmp_path, with_onnx=False), say=said.append)
    assert [check.inputs for check in report.checks] == ["random 1x3x96x128", "random 2x3x64x160"]
    assert any(line.startswith("random 1x3x97x131: the network itself refuses this size: shape '[") for line in said)


def test_a_network_that_takes_nothing_says_why(tmp_path: Path) -> None:
    class Never(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(RunError, match="the network takes no image of random 1x3x96x128: no; give --input_shape"):
        export_model(Never(), DESCRIBED, ExportOptions(save_dir=tmp_path))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"num_classes": 7}, {}, "the network has 2 classes, num_classes is 7"),
        (
            {"task": "classification"},
            {},
            r"the network gives \(1, 2, 96, 128\), which is segmentation, not classificat",
        ),
        ({"class_names": ("a",)}, {}, "1 class names for 2 classes: give one per class, or none"),
        ({"task": "classification"}, {"output_op": "argmax"}, "a classifier needs softmax or none"),
    ],
)
def test_a_description_that_is_not_of_this_network_is_refused(
    changes: dict[str, object], options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_model(Net(), replace(DESCRIBED, **changes), ExportOptions(save_dir=tmp_path, **options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_finite_is_not_fine() -> None:
    logits = torch.randn(1, 3, 4, 4)
    bad = torch.full((1, 3, 4, 4), float("nan"))
    assert distance(bad, logits, "none") == distance(bad, logits, "softmax") == float("inf")
    assert distance(torch.zeros(1, 3), torch.zeros(1, 3), "none") == 0
    assert distance(torch.full((1, 4, 4), 9, dtype=torch.int32), logits, "argmax") > 0


def test_int8_is_verified_with_real_images_alone(tmp_path: Path, pictures: Path) -> None:
    options = ExportOptions(save_dir=tmp_path, precisions=("int8",), input_shape=(8, 3, -1, -1))
    with pytest.raises(ExportError, match="int8 needs real images for verification, at least one whole batch; give"):
        export_model(Net(), DESCRIBED, options, images=find_images(pictures), read_images=read_batches)


def test_int8_needs_images(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="int8 takes the ranges of its activations from images: give --calibration"):
        export_model(Net(), DESCRIBED, ExportOptions(save_dir=tmp_path, precisions=("int8",)))


def test_images_of_another_size_than_the_export_are_refused(tmp_path: Path, pictures: Path) -> None:
    options = ExportOptions(save_dir=tmp_path / "out", input_shape=(-1, 3, 32, 32))
    with pytest.raises(
        RunError, match=r"a.png: is \(40, 60\) after its transforms, but the model is exported for \(32"
    ):
        export_model(Net(), DESCRIBED, options, images=find_images(pictures), read_images=read_batches)


def test_a_damaged_calibration_image_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "x.png"
    broken.write_bytes(b"no image")
    with pytest.raises(
        RunError, match=r"x.png: not an image file \(.*\); verification and calibration need images that can"
    ):
        export_model(
            Net(), DESCRIBED, ExportOptions(save_dir=tmp_path / "out"), images=[broken], read_images=read_batches
        )


def test_verification_sees_another_network(segmenter: Deployed) -> None:
    torch.manual_seed(5)
    other = Deployable(TinySegmenter(), "argmax")
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32), dtype=np.float32)
    checks = verify(other, segmenter, "fp32", [("x", [x])])
    assert [check.is_fine for check in checks] == [False, False]
    assert "BEYOND TOLERANCE" in str(checks[0])


class Enlarger(nn.Module):
    """Classes by large angles: float32 leaves four digits of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return (y + 3000.0).sin().exp() * (y * 1000.0).cos()


def test_a_network_that_enlarges_roundings_is_judged_by_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Deployable(Enlarger(), "none")
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32), dtype=np.float32)
    logits = network.logits(torch.from_numpy(x))
    own = own_rounding(network, x, logits)
    assert own > MAX_ERROR  # a case for it
    report = export_model(Enlarger(), DESCRIBED, ExportOptions(save_dir=tmp_path, output_op="none"))
    assert all(check.is_fine for check in report.checks)
    above = [check for check in report.checks if check.error > MAX_ERROR]
    assert all("the network's own rounding" in str(check) for check in above)


def test_roundings_excuse_no_wrong_export(segmenter: Deployed) -> None:
    """Off by far more than its rounding, and off where the rounding is not finite."""
    torch.manual_seed(5)
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32), dtype=np.float32)
    network = Deployable(TinySegmenter(), "argmax")
    check = verify(network, segmenter, "fp32", [("x", [x])])[0]
    assert 0 < check.own_rounding < 1e-5
    assert not check.is_fine
    assert own_rounding(network, x * np.float32(np.inf), network.logits(torch.from_numpy(x))) == 0.0


RELOAD = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("mezzo.vision.models", "mezzo.vision.recipes", "mezzo.vision.train")): raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import numpy as np
from mezzo.export import EngineOptions, load_engine, read_deployed
model = read_deployed(__import__("pathlib").Path(sys.argv[1]))
x = np.load(sys.argv[2])
print(json.dumps([load_engine(model, EngineOptions(), name)[0].run(x).tolist() for name in ("torch", "onnxruntime")]))
"""


@pytest.mark.slow
def test_a_new_process_without_the_source_gives_the_same(segmenter: Deployed, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    command = [sys.executable, "-c", RELOAD, str(segmenter.folder), str(tmp_path / "x.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    here = load_engine(segmenter, EngineOptions(), "onnxruntime")[0].run(x).tolist()
    assert json.loads(done.stdout) == [here, here]


def test_bfloat16_has_a_program_only(segmenter: Deployed) -> None:
    from mezzo.export import DeployError

    with pytest.raises(DeployError, match="has no ONNX file in bf16; choose another engine or precision"):
        load_engine(segmenter, EngineOptions(precision="bf16"), "onnxruntime")
    x = np.zeros((1, 3, 8, 8), np.float32)
    assert load_engine(segmenter, EngineOptions(precision="bf16"), "torch")[0].run(x).shape == (1, 8, 8)


def test_descriptions_are_written_as_they_are(segmenter: Deployed) -> None:
    assert replace(segmenter, folder=Path()).transforms == (
        {"type": "Resize", "target_size": [32, 24]},
        {"type": "Normalize"},
    )


def test_a_program_of_graph_mode_can_be_exported(tmp_path: Path) -> None:
    """What `Program.inference_module` gives is a network like any other."""
    from mezzo import static

    network = tiny_segmenter()
    with static.program_guard(static.Program()):
        images = static.data("images", [None, 3, None, None])
        logits = network(images)[0]
        module = logits._program.inference_module([logits])
    static.disable_static()
    transforms = ({"type": "Resize", "target_size": [32, 24]}, {"type": "Normalize"})
    described = Description(task="segmentation", model_name="tiny", num_classes=3, transforms=transforms)
    report = export_model(module, described, ExportOptions(save_dir=tmp_path, with_onnx=False))
    assert all(check.is_fine for check in report.checks)
    assert report.model.folder == tmp_path


class Strided(Net):
    """Has an operator that programs from anyone may not use."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.as_strided((1,), (1,)) * 0


def test_a_program_that_engines_refuse_is_verified_all_the_same_and_told(tmp_path: Path) -> None:
    options = ExportOptions(save_dir=tmp_path / "out", with_onnx=False, input_shape=(1, 3, 16, 16))
    with pytest.warns(UserWarning, match="will not load this program") as seen:
        export_model(Strided(), DESCRIBED, options)
    (warning,) = [str(one.message) for one in seen]
    assert warning.startswith(f"{tmp_path / 'out' / 'model.pt2'}: ")
    assert (tmp_path / "out" / "model.pt2").exists()
    with pytest.raises(MezzoError, match="as_strided"):
        load_engine(read_deployed(tmp_path / "out"), EngineOptions(), "torch")
