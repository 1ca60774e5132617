"""Lite data: layouts, the same pixels each time, all or nothing on the disk."""

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mezzo.vision.data import DATASETS, Cityscapes, DataError, ListDataset, open_classification
from mezzo.vision.lite import LITE, LITE_MARKER, _prepare, prepare
from mezzo.vision.lite._person import draw_person
from mezzo.vision.lite._shapes import CLASSES, draw_shape
from mezzo.vision.lite._street import draw_street

SMALL = {
    "imagenet_lite": {"count": (2, 1), "size": (32, 32)},
    "mini_supervisely": {"count": (3, 2, 2), "size": (64, 48)},
    "cityscapes": {"count": (3,), "size": (128, 64)},
}


def fingerprint(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_every_set_has_a_small_form_here() -> None:
    assert set(SMALL) == set(LITE)


@pytest.mark.parametrize("name", LITE)
def test_set_is_the_same_each_time(tmp_path: Path, name: str) -> None:
    first, second = (prepare(name, tmp_path / place, **SMALL[name]) for place in ("a", "deep/b"))
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) > 5


def pixels_hash(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def test_names_alone_decide_the_pixels() -> None:
    assert pixels_hash(draw_shape(3, "a")) == pixels_hash(draw_shape(3, "a"))
    assert pixels_hash(draw_shape(3, "a")) != pixels_hash(draw_shape(3, "b"))
    assert pixels_hash(*draw_person("a")) == pixels_hash(*draw_person("a"))
    assert pixels_hash(*draw_street("a", 128, 64)) != pixels_hash(*draw_street("b", 128, 64))


def test_global_generators_have_no_influence() -> None:
    np.random.seed(1)
    first = draw_shape(0, "x", (32, 32))
    np.random.seed(2)
    assert (draw_shape(0, "x", (32, 32)) == first).all()


def test_imagenet_lite_is_an_image_folder(tmp_path: Path) -> None:
    root = prepare("imagenet_lite", tmp_path / "x", count=(2, 1))
    train, val = (open_classification(root, split) for split in ("train", "val"))
    assert (len(train), len(val), train.num_classes) == (32, 16, 16)
    assert train.classes == val.classes == sorted(CLASSES)
    assert [train.read(i).label for i in range(32)] == [i // 2 for i in range(32)]
    sides = [side for i in range(32) for side in train.read(i).image.shape[:2]]
    assert 96 <= min(sides) < max(sides) <= 160
    assert (root / "test/demo.jpg").is_file()


def test_classes_of_imagenet_lite_differ_in_colour_and_shape() -> None:
    """The nearest mean of sixteen, by colour and outline at 12 x 12 pixels, is right far more often than 1 in 16."""

    def features(index: int, name: str) -> np.ndarray:
        image = draw_shape(index, name, (96, 96)).astype(float).reshape(12, 8, 12, 8, 3).mean(axis=(1, 3))
        return (image - image[0, 0]).ravel()

    means = np.stack([np.mean([features(k, f"t{k}{i}") for i in range(12)], 0) for k in range(16)])
    hits = [np.argmin(((means - features(k, f"v{k}{i}")) ** 2).sum(1)) == k for k in range(16) for i in range(4)]
    assert np.mean(hits) > 0.3


def test_mini_supervisely_has_images_labels_and_lists(tmp_path: Path) -> None:
    root = prepare("mini_supervisely", tmp_path / "x", **SMALL["mini_supervisely"])
    lines = (root / "train.txt").read_text().splitlines()
    assert lines[0] == "Images/train_0000.png Annotations/train_0000.png"
    for mode, count in (("train", 3), ("val", 2), ("test", 2)):
        data = ListDataset(str(root), 2, mode, **{f"{mode}_path": f"{root}/{mode}.txt"})
        assert len(data) == count
        for index in range(count):
            sample = data.read(index)
            assert sample.image.shape == (48, 64, 3)
            assert set(np.unique(sample.label)) == {0, 1}


def test_people_fill_a_fair_part_of_images_of_many_sizes() -> None:
    parts, sizes = [], set()
    for index in range(30):
        image, label = draw_person(f"{index}")
        assert image.shape[:2] == label.shape
        parts.append(label.mean())
        sizes.add(label.shape)
    assert min(parts) > 0.03
    assert max(parts) < 0.6
    assert len(sizes) > 20
    assert min(min(size) for size in sizes) >= 200
    assert max(max(size) for size in sizes) <= 400


def test_colour_tells_person_from_background() -> None:
    red_over_blue, labels = [], []
    for index in range(10):
        image, label = draw_person(f"{index}")
        red_over_blue.append((image[..., 0].astype(int) - image[..., 2]).ravel())
        labels.append(label.ravel())
    right = (np.concatenate(red_over_blue) > 10) == (np.concatenate(labels) == 1)
    assert 0.7 < right.mean() < 0.99, "one threshold is neither useless nor enough"


def test_cityscapes_has_its_trees_and_lists(tmp_path: Path) -> None:
    root = prepare("cityscapes", tmp_path / "x", **SMALL["cityscapes"])
    train, val = (Cityscapes(str(root), mode) for mode in ("train", "val"))
    assert (len(train), len(val)) == (3, 5)
    assert train.read(0).image.shape == (64, 128, 3)
    lines = (root / "cityscapes_val_5.list").read_text().splitlines()
    ids = ("000294", "000576", "001016", "001236", "001751")
    assert lines == [
        f"leftImg8bit/val/frankfurt/frankfurt_000000_{n}_leftImg8bit.png "
        f"gtFine/val/frankfurt/frankfurt_000000_{n}_gtFine_labelTrainIds.png"
        for n in ids
    ]
    for name, count in (("train.list", 3), ("val.list", 5), ("cityscapes_val_5.list", 5)):
        options = {"dataset_root": str(root), "num_classes": 19, "mode": "val", "val_path": str(root / name)}
        assert len(DATASETS["Dataset"](**options)) == count


def test_streets_show_all_nineteen_classes_and_ignored_pixels() -> None:
    counts = np.zeros(256, int)
    for index in range(16):
        counts += np.bincount(draw_street(f"{index}", 256, 128)[1].ravel(), minlength=256)
    assert (counts[:19] > 500).all()
    assert counts[255] > 500
    assert counts[19:255].sum() == 0


def test_labels_are_single_channel_png(tmp_path: Path) -> None:
    root = prepare("cityscapes", tmp_path / "x", **SMALL["cityscapes"])
    for path in root.rglob("*labelTrainIds.png"):
        with Image.open(path) as label:
            assert label.mode == "L"


def test_defaults_are_the_documented_numbers() -> None:
    assert _prepare._options("imagenet_lite", {}) == {"count": [40, 10], "size": None}
    assert _prepare._options("mini_supervisely", {}) == {"count": [120, 50, 50], "size": None}
    assert _prepare._options("cityscapes", {}) == {"count": [16], "size": [512, 256]}


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    prepare("cityscapes", tmp_path / "x", progress=lambda *step: seen.append(step), **SMALL["cityscapes"])
    assert seen == [(i, 8) for i in range(1, 9)]


def test_finished_set_is_used_again(tmp_path: Path) -> None:
    root = prepare("cityscapes", tmp_path / "x", **SMALL["cityscapes"])
    before = (root / "train.list").stat().st_mtime_ns
    time.sleep(0.01)
    seen: list[tuple[int, int]] = []
    assert prepare("cityscapes", root, progress=lambda *step: seen.append(step), **SMALL["cityscapes"]) == root
    assert seen == []
    assert (root / "train.list").stat().st_mtime_ns == before


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    assert len(Cityscapes(str(prepare("cityscapes", tmp_path, **SMALL["cityscapes"])))) == 3


@pytest.mark.parametrize("marker", [None, "not json", "[1]"])
def test_foreign_folder_is_refused(tmp_path: Path, marker: str | None) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    if marker is not None:
        (tmp_path / LITE_MARKER).write_text(marker)
    with pytest.raises(DataError, match="not empty and not made by this command; choose another folder"):
        prepare("cityscapes", tmp_path)
    assert (tmp_path / "holiday.jpg").read_bytes() == b"precious"


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(DataError, match="x: not empty and not made by this command"):
        prepare("cityscapes", tmp_path / "x")


def test_other_options_or_version_are_refused(tmp_path: Path) -> None:
    root = prepare("cityscapes", tmp_path / "x", **SMALL["cityscapes"])
    with pytest.raises(
        DataError,
        match=re.escape(
            "holds cityscapes of version 1 with {'count': [3], 'size': [128, 64]}, asked is cityscapes of version 1 with "
            "{'count': [16], 'size': [512, 256]}; remove it or choose another folder"
        ),
    ):
        prepare("cityscapes", root)
    with pytest.raises(DataError, match="asked is mini_supervisely"):
        prepare("mini_supervisely", root)
    marker = json.loads((root / LITE_MARKER).read_text())
    (root / LITE_MARKER).write_text(json.dumps(marker | {"version": 0}))
    with pytest.raises(DataError, match="holds cityscapes of version 0"):
        prepare("cityscapes", root, **SMALL["cityscapes"])


def test_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("cityscapes", tmp_path / "x", progress=stop, **SMALL["cityscapes"])
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_end_with_one_set(tmp_path: Path) -> None:
    """The second starts and ends while the first is drawing, as ranks of one job do."""
    target = tmp_path / "x"

    def another(done: int, total: int) -> None:
        if done == 4:
            prepare("cityscapes", target, **SMALL["cityscapes"])

    assert prepare("cityscapes", target, progress=another, **SMALL["cityscapes"]) == target
    assert list(tmp_path.iterdir()) == [target]


def test_foreign_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def another(done: int, total: int) -> None:
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / "mine").write_text("precious")

    with pytest.raises(DataError, match="x: not empty and not made by this command"):
        prepare("cityscapes", tmp_path / "x", progress=another, **SMALL["cityscapes"])
    assert (tmp_path / "x" / "mine").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/x: cannot be written \((Not a directory|File exists)\)"):
        prepare("cityscapes", tmp_path / "file" / "x")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cityscape", {}, "unknown lite data set 'cityscape'; did you mean 'cityscapes'? allowed: imagenet_lite"),
        ("cityscapes", {"sise": 3}, "cityscapes: unknown option 'sise'; did you mean 'size'? allowed: count, size"),
        ("cityscapes", {"size": 512}, "cityscapes: size=512 must be two integers, width and height, from 64 to 4096"),
        ("cityscapes", {"size": (512, 9)}, "cityscapes: size=[512, 9] must be two integers"),
        ("cityscapes", {"count": (1, 2)}, "cityscapes: count=[1, 2] must be 1 integers (train) from 1 to 100000"),
        ("imagenet_lite", {"count": 5}, "imagenet_lite: count=5 must be 2 integers (train, val) from 1 to 100000"),
        (
            "mini_supervisely",
            {"count": [0, 1, 1]},
            "mini_supervisely: count=[0, 1, 1] must be 3 integers (train, val, test)",
        ),
        ("mini_supervisely", {"size": [31, 64]}, "mini_supervisely: size=[31, 64] must be two integers"),
    ],
)
def test_wrong_name_or_option_is_one_line(tmp_path: Path, name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        prepare(name, tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


def test_neither_data_nor_training_load_the_painters():
    code = (
        "import sys, mezzo.vision.train, mezzo.cli\nassert not [name for name in sys.modules if 'vision.lite' in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
