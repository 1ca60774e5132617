"""Images through an exported model."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from mezzo.errors import OptionError, RunError
from mezzo.export import Choice, Deployed, DeployError, EngineOptions
from mezzo.vision.data import Sample
from mezzo.vision.infer import InferOptions, compose_transforms, infer, parse_reports
from tiny_nets import tiny_segmenter


def test_label_maps_are_those_of_the_network_at_the_size_of_the_image(
    segmenter: Deployed, pictures: Path, tmp_path: Path
) -> None:
    result = infer(segmenter, InferOptions(images=pictures, save_dir=tmp_path / "out", batch_size=2))
    assert (result.images, result.refused, result.choice.engine) == (3, (), "onnxruntime")
    image = cv2.cvtColor(cv2.imread(str(pictures / "c.png")), cv2.COLOR_BGR2RGB)
    compose = compose_transforms(segmenter)
    small = compose(Sample(image, None, "c"), np.random.default_rng(0)).image
    x = torch.from_numpy(small).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        labels = tiny_segmenter()(x)[0].argmax(1)[None].float()
    right = torch.nn.functional.interpolate(labels, size=image.shape[:2], mode="nearest-exact")[0, 0].numpy()
    from PIL import Image

    written = np.array(Image.open(tmp_path / "out" / "labels" / "c.png"))
    assert written.shape == image.shape[:2]
    assert np.mean(written == right) > 0.999  # a label may lie at a border between classes


def test_every_image_gets_its_pictures_and_all_get_a_sheet(segmenter: Deployed, pictures: Path, tmp_path: Path) -> None:
    result = infer(segmenter, InferOptions(images=pictures, save_dir=tmp_path))
    names = sorted(str(path.relative_to(tmp_path)) for path in result.files)
    assert names == [
        "labels/a.png", "labels/b.png", "labels/c.png", "overlays/a.jpg", "overlays/b.jpg", "overlays/c.jpg", "sheet.png",
    ]  # fmt: skip
    assert all(path.stat().st_size > 0 for path in result.files)


def test_person_models_cut_out(segmenter: Deployed, pictures: Path, tmp_path: Path) -> None:
    person = replace(segmenter, num_classes=2, transforms=({"type": "Normalize"},))

    class Engine:
        def run(self, images: np.ndarray) -> np.ndarray:
            return (images[:, 0] > 0).astype(np.int32)

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("mezzo.vision.infer._run.load_engine", lambda *a: (Engine(), Choice("torch", {})))
        result = infer(person, InferOptions(images=pictures / "a.png", save_dir=tmp_path))
    (cut,) = [path for path in result.files if "cutouts" in str(path)]
    alpha = cv2.imread(str(cut), cv2.IMREAD_UNCHANGED)[:, :, 3]
    red = cv2.imread(str(pictures / "a.png"))[:, :, 2]
    assert np.array_equal(alpha > 0, red > 127.5)


def test_classes_are_said_with_names_and_scores(classifier: Deployed, pictures: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options = InferOptions(images=pictures, save_dir=tmp_path, top_k=2)
    result = infer(classifier, options, say=said.append)
    stored = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert len(said) == len(stored) == result.images == 3
    first = stored[0]["classes"][0]
    assert first["class_name"] == ("ant", "bee", "cat", "dog")[first["class_id"]]
    assert 0 < stored[0]["classes"][1]["score"] <= first["score"] < 1
    assert said[0].startswith(f"image_name: {pictures / 'a.png'}, class_id: {first['class_id']}, class_name: ")


def test_other_sizes_can_be_asked_for(classifier: Deployed, pictures: Path) -> None:
    said: list[str] = []
    infer(classifier, InferOptions(images=pictures / "a.png", resize_size=40, crop_size=36), say=said.append)
    usual: list[str] = []
    infer(classifier, InferOptions(images=pictures / "a.png"), say=usual.append)
    assert said != usual


def test_a_damaged_image_is_named_and_the_rest_is_done(segmenter: Deployed, pictures: Path, tmp_path: Path) -> None:
    (pictures / "b.jpg").write_bytes((pictures / "b.jpg").read_bytes()[:100])
    said: list[str] = []
    result = infer(segmenter, InferOptions(images=pictures, save_dir=tmp_path), say=said.append)
    assert (result.images, [refused.path.name for refused in result.refused]) == (2, ["b.jpg"])
    assert said == [f"skipped: {pictures / 'b.jpg'}: {result.refused[0].reason}"]


def test_no_image_that_can_be_read_is_an_error(segmenter: Deployed, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no")
    with pytest.raises(RunError, match=r"none of 1 images could be used, first: .*x.png: not an image file"):
        infer(segmenter, InferOptions(images=tmp_path))


def test_the_report_has_the_times_of_all_batches(classifier: Deployed, pictures: Path, tmp_path: Path) -> None:
    options = InferOptions(images=pictures, benchmark=True, save_dir=tmp_path, warmup=2, run=EngineOptions(threads=1))
    report = infer(classifier, options).report
    assert report is not None
    (read,) = parse_reports("\n".join(report.lines()))
    assert (read["data_num"], read["model_name"], read["precision"], read["warnings"]) == (3, "tiny", "fp32", [])
    assert (read["runtime_device"], read["cpu_math_library_num_threads"], read["batch_size"]) == ("cpu", 1, 1)
    stored = json.loads((tmp_path / "benchmark.json").read_text())
    assert stored["engine"] == "onnxruntime"


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_report_says_how_many_runs_warmed_up_and_counts_them_nowhere_else(
    warmup: int, classifier: Deployed, pictures: Path
) -> None:
    options = InferOptions(images=pictures, benchmark=True, warmup=warmup, run=EngineOptions(threads=1))
    report = infer(classifier, options).report
    assert report is not None
    assert f" warmup: {warmup}" in report.lines()
    assert report.as_dict()["data_num"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"warmup": -1}, "warmup=-1: must be at least 0"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"crop_size": 0}, "crop_size=0: must be at least 1"),
    ],
)
def test_wrong_numbers_are_one_line(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError) as error:
        InferOptions(images=Path("x"), **options)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_options_that_do_not_fit_the_model_are_one_line(segmenter: Deployed, pictures: Path) -> None:
    with pytest.raises(
        OptionError, match="resize_size and crop_size are for classification; this model does segmentation"
    ):
        infer(segmenter, InferOptions(images=pictures, crop_size=8))
    without = replace(segmenter, task="classification", transforms=({"type": "Normalize"},))
    with pytest.raises(
        OptionError, match=r"the model's transforms have no CenterCrop whose size could be 8; see its depl"
    ):
        infer(without, InferOptions(images=pictures, crop_size=8))
    fixed = replace(segmenter, input_shape=(4, 3, 24, 32))
    with pytest.raises(OptionError, match="batch_size=1: the model was exported for batches of 4; use that, or export"):
        infer(fixed, InferOptions(images=pictures))
    with pytest.raises(
        DeployError, match=r"a.png: is \(3, 24, 32\) for the network, but the model was exported for \(3, 9"
    ):
        infer(replace(segmenter, input_shape=(-1, 3, 9, 9)), InferOptions(images=pictures))


def test_a_short_batch_is_filled_up_for_a_fixed_one(tmp_path: Path, pictures: Path) -> None:
    from mezzo.export import Description, ExportOptions, export_model

    transforms = ({"type": "Resize", "target_size": [32, 24]}, {"type": "Normalize"})
    described = Description(task="segmentation", model_name="tiny", num_classes=3, transforms=transforms)
    free = export_model(tiny_segmenter(), described, ExportOptions(save_dir=tmp_path / "a")).model
    fixed = export_model(
        tiny_segmenter(), described, ExportOptions(save_dir=tmp_path / "b", input_shape=(2, 3, 24, 32))
    ).model
    for model, batch, name in ((free, 1, "free"), (fixed, 2, "fixed")):
        result = infer(model, InferOptions(images=pictures, save_dir=tmp_path / name, batch_size=batch))
        assert result.images == 3
    for name in ("a", "b", "c"):
        one, two = (cv2.imread(str(tmp_path / way / "labels" / f"{name}.png")) for way in ("free", "fixed"))
        assert np.mean(one == two) > 0.999


def test_an_image_that_the_network_refuses_is_skipped(segmenter: Deployed, pictures: Path, tmp_path: Path) -> None:
    class Engine:
        def run(self, images: np.ndarray) -> np.ndarray:
            if images.shape[2] == 50:
                raise RunError("engine cannot run images of this size")
            return np.zeros((len(images), *images.shape[2:]), np.int32)

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mezzo.vision.infer._run.load_engine", lambda *a: (Engine(), Choice("torch", {})))
        plain = replace(segmenter, transforms=({"type": "Normalize"},))
        result = infer(plain, InferOptions(images=pictures, save_dir=tmp_path), say=said.append)
    assert (result.images, [refused.path.name for refused in result.refused]) == (2, ["c.png"])
    assert said == [f"skipped: {pictures / 'c.png'}: engine cannot run images of this size"]


def test_decoding_the_first_image_is_timed(classifier: Deployed, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "x.png"), np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8))
    report = infer(classifier, InferOptions(images=tmp_path / "x.png", benchmark=True)).report
    assert report is not None
    assert report.times.preprocess_ms > 1  # a PNG of 6.7 MB


def test_progress_counts_images(segmenter: Deployed, pictures: Path) -> None:
    seen: list[tuple[int, int]] = []
    infer(
        segmenter, InferOptions(images=pictures, batch_size=2), progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(2, 3), (3, 3)]
