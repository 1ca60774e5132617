"""The documents' command lines for export and prediction."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mezzo.cli import run
from mezzo.export import Deployed, read_deployed
from mezzo.vision.infer import parse_reports
from mezzo.vision.recipes import Recipe
from tiny_nets import TinyClassifier, tiny_segmenter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file of PP-HumanSeg-Lite whose data is not there."""
    data = {
        "type": "Dataset", "dataset_root": str(tmp_path / "none"), "num_classes": 3, "mode": "val",
        "val_path": str(tmp_path / "none" / "val.txt"),
        "transforms": [{"type": "Resize", "target_size": [32, 32]}, {"type": "Normalize"}],
    }  # fmt: skip
    content = {
        "batch_size": 1, "iters": 1, "val_dataset": data,
        "train_dataset": {**data, "mode": "train", "train_path": "x", "val_path": None},
        "optimizer": {"type": "sgd"}, "lr_scheduler": {"type": "PolynomialDecay", "learning_rate": 0.1},
        "loss": {"types": [{"type": "CrossEntropyLoss"}], "coef": [1]}, "model": {"type": "PPHumanSegLite"},
    }  # fmt: skip
    del content["train_dataset"]["val_path"]  # type: ignore[attr-defined]
    path = tmp_path / "net.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_prediction_by_the_documents_line(segmenter: Deployed, pictures: Path, tmp_path: Path) -> None:
    done = script(
        "deploy/python/infer.py", "--device=cpu", "--enable_mkldnn=True", "--cpu_threads=1",
        f"--config={segmenter.folder}/deploy.yaml", "--batch_size=1", f"--image_path={pictures}", "--benchmark=True",
        "--precision=fp32", f"--save_dir={tmp_path / 'results'}", "--model_name=tiny_net",
        f"--save_log_path={tmp_path / 'log'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (report,) = parse_reports(done.stdout)
    assert (report["model_name"], report["enable_mkldnn"], report["data_num"]) == ("tiny_net", True, 3)
    assert parse_reports((tmp_path / "log").read_text()) == [report]
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[INFO\]\t-+ Env info -+$", done.stdout, re.MULTILINE)
    assert (tmp_path / "results" / "labels" / "a.png").exists()
    assert "3 images predicted, 0 skipped; 8 files in" in done.stdout


def test_classification_by_the_documents_line(
    classifier: Deployed, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["infer", "--use-gpu=False", f"--model-dir={classifier.folder}", "--batch-size=1", "--benchmark=False"]
    assert run([*line, f"--img-path={pictures / 'a.png'}", "--warmup", "1", "--max-batch-size", "8"]) == 0
    out = capsys.readouterr().out
    assert re.match(
        rf"image_name: {re.escape(str(pictures / 'a.png'))}, class_id: \d, class_name: \w+, score: 0\.\d+\n", out
    )
    assert "1 images predicted, 0 skipped" in out


def test_a_damaged_image_gives_1_and_the_rest_is_done(
    segmenter: Deployed, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "b.jpg").write_bytes(b"no")
    line = [
        "infer",
        "--config",
        str(segmenter.folder),
        "--image_path",
        str(pictures),
        "--save_dir",
        str(tmp_path / "o"),
    ]
    assert run([*line, "--device", "cpu", "--print_detail"]) == 1
    out = capsys.readouterr().out
    assert f"skipped: {pictures / 'b.jpg'}: not an image file" in out
    assert str(tmp_path / "o" / "labels" / "c.png") in out


def test_auto_says_what_it_tried(
    segmenter: Deployed, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["infer", "--config", str(segmenter.folder), "--images", str(pictures), "--save_dir", str(tmp_path)]
    assert run([*line, "--engine", "auto", "--threads", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^engine onnxruntime: [\d.]+ ms$", out, re.MULTILINE)
    assert re.search(r"^engine (chosen|remembered): \w+", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use_trt", "True"], "--use_trt: there is no TensorRT engine"),
        (["--batch-size", "4", "--max-batch-size", "2"], "--batch-size 4 is more than --max-batch-size 2"),
        (["--device", "tpu"], "device tpu: must be one of auto, cpu, gpu, gpu:N"),
        (["--engine", "tensorrt"], "there is no TensorRT engine in mezzo; on a GPU use --engine torch-graph"),
        (["--precision", "int8"], "has no int8 model, only fp32"),
        (["--benchmark=maybe"], "'maybe': must be True or False"),
        (["--benchmarks", "True"], "No such option: --benchmarks"),
        (["--image-path", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(
    words: list[str], message: str, segmenter: Deployed, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["infer", "--config", str(segmenter.folder), "--device", "cpu", "--image-path", str(pictures), *words]
    assert run(line) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_without_images_a_usual_one_is_taken(
    classifier: Deployed,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["infer", "--use-gpu=False", f"--model-dir={classifier.folder}", "--batch-size=1", "--benchmark=False"]
    assert run(line) == 2
    assert (
        "no images: give --image-path FILE, FOLDER or LIST (there is no ./images/demo.jpg either)"
        in capsys.readouterr().err
    )
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "demo.jpg").write_bytes((pictures / "b.jpg").read_bytes())
    assert run(line) == 0
    assert "image_name: images/demo.jpg, class_id: " in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_one_line(
    segmenter: Deployed, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["infer", "--config", str(segmenter.folder), "--device", "gpu:9", "--image-path", str(pictures)]
    assert run(line) == 2
    assert "device cuda:9: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "output_op"),
    [
        (["--output_op", "softmax"], "softmax"),
        (["--with_softmax"], "softmax"),
        (["--without_argmax", "True"], "none"),
        (["--output_op", "argmax", "--without_argmax"], "argmax"),
        ([], "argmax"),
    ],
)
def test_export_of_a_file_by_the_documents_line(
    words: list[str],
    output_op: str,
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recipe, "create_model", lambda recipe: tiny_segmenter())
    line = ["export", "--config", str(config), "--save_dir", str(tmp_path / "out"), *words]
    assert run([*line, "--input_shape", "1", "3", "32", "32"]) == 0
    out = capsys.readouterr().out
    assert "no weights given (--model_path): the network is exported as it was initialised" in out
    assert "no real images of the val split: " in out
    assert re.search(r"^maximum error of fp32: \d\.\d\de[+-]\d\d$", out, re.MULTILINE)
    model = read_deployed(tmp_path / "out")
    assert (model.output_op, model.input_shape, model.num_classes) == (output_op, (1, 3, 32, 32), 3)
    assert model.transforms == ({"type": "Resize", "target_size": [32, 32]}, {"type": "Normalize"})


def test_export_of_a_classifier_by_the_documents_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.vision.models.create_model", lambda name, num_classes: TinyClassifier())
    (tmp_path / "names.txt").write_text("".join(f"class {n}\n" for n in range(4)))
    line = ["export", "--model=mobilenet_v3_small", f"--save-inference-dir={tmp_path / 'out'}", "--num-classes", "4"]
    assert run([*line, "--img-size", "64", "--class-names", str(tmp_path / "names.txt"), "--no-onnx"]) == 0
    model = read_deployed(tmp_path / "out")
    assert (model.task, model.output_op, model.class_names[3]) == ("classification", "softmax", "class 3")
    assert model.transforms[1] == {"type": "CenterCrop", "size": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither of --config and --model: give --config FILE.yml, or --model with a classifier's name"),
        (["--config", "a", "--model", "b"], "both of --config and --model: give --config FILE.yml, or --model with a"),
        (["--model", "mobilenet_v3_small", "--output-op", "max"], "unknown output_op 'max'; did you mean 'argmax'?"),
        (["--model", "mobilenet_v3_small", "--precision", "fp8"], "'fp8'; allowed: fp32, fp16"),
        (
            ["--model", "mobilenet_v3_small", "--class-names", "none.txt"],
            "--class-names: none.txt: no such file",
        ),
        (["--model", "mobilenet_v3_small", "--precision", "int8"], "int8 takes the ranges of its activations from"),
        (["--model", "mobilenet_v3_smal"], "mobilenet_v3_small"),
        (["--model", "mobilenet_v3_small", "--num-classes", "0"], "--num-classes=0: must be at least 1"),
        (["--model", "mobilenet_v3_small", "--without_argmax=maybe"], "'maybe': must be True or False"),
    ],
)
def test_an_export_that_cannot_be_is_one_line_and_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["export", *words, "--save-dir", "out"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_every_engine_by_one_command(segmenter: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "infer", str(segmenter.folder), "--size", "24", "32", "--rounds", "1", "--runs", "2"]
    line += ["--threads", "1", "--batches", "1,2", "--engines", "onnxruntime,torch,torch-graph"]
    assert run([*line, "--precisions", "fp32,int8", "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 2 * 2
    assert "torch-graph replays CUDA graphs" in out
    assert "has no int8 model, only fp32" in out
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert run([*line, "--threads", "x"]) == 2
    assert "x: must be whole numbers with commas between them" in capsys.readouterr().err
