"""Segmentation data: pairs as the lists and trees say, faults as one line with file and line number."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from pictures import noise, write

from mezzo.vision.data import (
    ADE20K,
    DATASETS,
    Cityscapes,
    DataError,
    ListDataset,
    MiniDeepGlobeRoadExtraction,
    OpticDiscSeg,
    PascalVOC,
    PPHumanSeg14K,
)


def ids(value: int = 0, size: tuple[int, int] = (60, 90)) -> np.ndarray:
    return np.full(size, value, np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three pairs; the labels are 0, 1 and ignored."""
    for index, value in enumerate((0, 1, 255)):
        write(tmp_path / f"Images/{index}.png", noise(seed=index))
        write(tmp_path / f"Annotations/{index}.png", ids(value))
    (tmp_path / "train.txt").write_text("".join(f"Images/{i}.png Annotations/{i}.png\n" for i in (2, 0, 1)))
    return tmp_path


def with_list(root: Path, text: str, **options: object) -> ListDataset:
    (root / "list.txt").write_text(text)
    options = {"mode": "train", "train_path": "list.txt", "test_path": "list.txt", "val_path": "list.txt"} | options
    return ListDataset(str(root), 2, **options)


def test_pairs_come_in_the_order_of_the_list(root: Path) -> None:
    data = DATASETS["Dataset"](dataset_root=str(root), train_path=str(root / "train.txt"), num_classes=2, mode="train")
    assert (len(data), data.num_classes) == (3, 2)
    assert [Path(data.path(i)).name for i in range(3)] == ["2.png", "0.png", "1.png"]
    sample = data.read(2)
    assert sample.path == data.path(2)
    assert (sample.image == noise(seed=1)).all()
    assert (sample.label == 1).all()


def test_every_read_gives_arrays_of_its_own(root: Path) -> None:
    data = with_list(root, "Images/0.png Annotations/0.png")
    first = data.read(0)
    first.image[:], first.label[:] = 0, 9
    assert (data.read(0).image == noise(seed=0)).all()
    assert (data.read(0).label == 0).all()


def test_dataset_goes_to_workers(root: Path) -> None:
    data = pickle.loads(pickle.dumps(with_list(root, "Images/0.png Annotations/0.png")))  # noqa: S301
    assert data.read(0).image.shape == (60, 90, 3)


def test_list_is_found_from_the_current_folder_before_the_root(root: Path, monkeypatch) -> None:
    (root / "here").mkdir()
    (root / "here" / "train.txt").write_text("Images/1.png Annotations/1.png")
    monkeypatch.chdir(root / "here")
    assert len(ListDataset(str(root), 2, train_path="train.txt")) == 1
    monkeypatch.chdir(root)
    (root / "here" / "train.txt").unlink()
    assert len(ListDataset(str(root), 2, train_path="train.txt")) == 3


def test_blank_lines_a_byte_order_mark_and_windows_ends_do_no_harm(root: Path) -> None:
    assert len(with_list(root, "\ufeffImages/0.png Annotations/0.png\r\n\r\n  \nImages/1.png Annotations/1.png")) == 2


def test_other_separator(root: Path) -> None:
    assert len(with_list(root, "Images/0.png,Annotations/0.png\n", separator=",")) == 1


def test_absolute_path_inside_the_root_is_fine(root: Path) -> None:
    assert with_list(root, f"{root}/Images/0.png Images/../Annotations/0.png").read(0).label.max() == 0


def test_list_may_name_files_outside_of_the_root(root: Path) -> None:
    (root / "lists").mkdir()
    (root / "list.txt").write_text(f"../Images/1.png {root}/Annotations/1.png\n../Images/2.png ../Annotations/2.png\n")
    data = ListDataset(str(root / "lists"), 2, train_path=str(root / "list.txt"))
    assert [int(data.read(index).label.max()) for index in range(2)] == [1, 255]
    assert (data.read(1).image == noise(seed=2)).all()


def test_test_list_may_lack_labels(root: Path) -> None:
    data = with_list(root, "Images/0.png\nImages/1.png Annotations/1.png", mode="test")
    assert data.read(0).label is None
    assert data.read(1).label.max() == 1


def test_other_ignored_value_becomes_255(root: Path) -> None:
    data = with_list(root, "Images/1.png Annotations/1.png", ignore_index=1)
    assert (data.read(0).label == 255).all()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", "train", "{list}: the list is empty"),
        ("\n \n", "train", "{list}: the list is empty"),
        ("\nImages/0.png", "train", "{list}:2: 1 columns in 'Images/0.png'; a line is 'image label'"),
        ("a b c", "val", "{list}:1: 3 columns in 'a b c'; a line is 'image label'"),
        ("a b c", "test", "{list}:1: 3 columns in 'a b c'; a line is 'image label' or 'image'"),
        ("../x.png Annotations/0.png", "train", "{list}:1: {root}/../x.png: no such file"),
        ("/none/x.png Annotations/0.png", "train", "{list}:1: /none/x.png: no such file"),
        ("Images/0.png  Annotations/0.png", "train", "{list}:1: 3 columns in"),
        ("Images/9.png Annotations/0.png", "train", "{list}:1: {root}/Images/9.png: no such file"),
        ("Images/0.png Annotations/9.png", "train", "{list}:1: {root}/Annotations/9.png: no such file"),
        ("Images/0.png /dev/zero", "train", "{list}:1: /dev/zero: is a device, not a file"),
        ("Images Annotations/0.png", "train", "{list}:1: {root}/Images: is a folder, not a file"),
        ("Images/0.png\0 Annotations/0.png", "train", "{list}:1: 'Images/0.png\\x00' is not a file name"),
    ],
)
def test_fault_of_a_list_names_file_and_line(root: Path, text: str, mode: str, message: str) -> None:
    expected = message.format(list=root / "list.txt", root=root)
    with pytest.raises(DataError, match=re.escape(expected)):
        with_list(root, text, mode=mode)


def test_list_that_is_no_text_is_refused(root: Path) -> None:
    (root / "list.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"list.bin:1: not UTF-8 text \(byte 0\)"):
        ListDataset(str(root), 2, train_path="list.bin")


def test_list_that_is_a_folder_is_refused(root: Path) -> None:
    with pytest.raises(DataError, match="Images: is a folder, not a file"):
        ListDataset(str(root), 2, train_path=str(root / "Images"))


def test_missing_list_and_folder_are_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"^lost.txt: no such list file"):
        ListDataset(str(root), 2, train_path="lost.txt")
    with pytest.raises(DataError, match=r"dataset_root 'nowhere': no such folder"):
        ListDataset("nowhere", 2, train_path="train.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "valid"}, "unknown mode 'valid'; did you mean 'val'? allowed: train, val, test"),
        ({"train_path": None}, "Dataset: mode='train' needs train_path, the list file"),
        ({"separator": ""}, "Dataset: separator='' is empty; give what stands between the columns"),
        ({"edge": True}, "edge=True: edge labels are not offered"),
        ({"img_channels": 1}, "img_channels=1: images are RGB, only 3 is possible"),
        ({"ignore_index": 300}, "ignore_index=300: must be an integer from 0 to 255"),
    ],
)
def test_wrong_argument_is_named(root: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        with_list(root, "Images/0.png Annotations/0.png", **options)


@pytest.mark.parametrize("count", [0, 256, True, 2.0])
def test_number_of_classes_fits_in_a_label(root: Path, count: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"num_classes={count!r}: must be an integer from 1 to 255")):
        ListDataset(str(root), count, train_path=str(root / "train.txt"))


def test_label_that_is_no_class_names_file_and_value(root: Path) -> None:
    label = ids(1)
    label[3, :4] = 2
    write(root / "Annotations/0.png", label)
    data = with_list(root, "Images/0.png Annotations/0.png")
    with pytest.raises(
        DataError,
        match=r"Annotations/0.png: label 2 in 4 pixels, but there are 2 classes \(0 to 1, 255 is ignored\)",
    ):
        data.read(0)


def test_image_and_label_of_different_size_are_both_named(root: Path) -> None:
    write(root / "Annotations/0.png", ids(0, (61, 90)))
    data = with_list(root, "Images/0.png Annotations/0.png")
    with pytest.raises(
        DataError, match=r"Images/0.png is 90 x 60 and its label .*Annotations/0.png is 90 x 61 \(width x height\)"
    ):
        data.read(0)


def cityscapes_pair(root: Path, name: str, mode: str = "train", *, image: bool = True, label: bool = True) -> None:
    city = name.partition("_")[0]
    if image:
        write(root / "leftImg8bit" / mode / city / f"{name}_leftImg8bit.png", noise())
    if label:
        write(root / "gtFine" / mode / city / f"{name}_gtFine_labelTrainIds.png", ids(18))


def test_cityscapes_trees_are_sorted_and_zipped(tmp_path: Path) -> None:
    for name in ("ulm_000001_000019", "aachen_000002_000019", "aachen_000001_000019"):
        cityscapes_pair(tmp_path, name)
    data = Cityscapes(str(tmp_path))
    assert (len(data), data.num_classes) == (3, 19)
    names = [Path(data.path(i)).name.removesuffix("_leftImg8bit.png") for i in range(3)]
    assert names == ["aachen_000001_000019", "aachen_000002_000019", "ulm_000001_000019"]
    assert (data.read(1).label == 18).all()


def test_cityscapes_without_partner_names_the_first(tmp_path: Path) -> None:
    cityscapes_pair(tmp_path, "ulm_000001_000019")
    cityscapes_pair(tmp_path, "ulm_000002_000019", label=False)
    with pytest.raises(
        DataError, match=r"2 images and 1 labels .* 1 without partner; the first, ulm/ulm_000002_000019, has no label"
    ):
        Cityscapes(str(tmp_path))
    cityscapes_pair(tmp_path, "aachen_000009_000019", image=False)
    with pytest.raises(DataError, match="the first, aachen/aachen_000009_000019, has no image"):
        Cityscapes(str(tmp_path))


def test_cityscapes_test_images_may_lack_labels(tmp_path: Path) -> None:
    cityscapes_pair(tmp_path, "berlin_000001_000019", "test", label=False)
    assert Cityscapes(str(tmp_path), mode="test").read(0).label is None


def test_empty_cityscapes_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no leftImg8bit/val/\*/\*_leftImg8bit.png; is this the Cityscapes folder"):
        Cityscapes(str(tmp_path), mode="val")


def test_ade20k_counts_classes_from_zero_and_ignores_what_is_not_labelled(tmp_path: Path) -> None:
    label = ids(150)
    label[0] = 0
    write(tmp_path / "images/validation/a.jpg", noise())
    write(tmp_path / "annotations/validation/a.png", label)
    data = ADE20K(str(tmp_path), mode="val")
    assert set(np.unique(data.read(0).label)) == {149, 255}
    with pytest.raises(DataError, match=r"no images/training/\*.jpg; is this the ADE20K folder"):
        ADE20K(str(tmp_path))
    with pytest.raises(ValueError, match="unknown mode 'test'; allowed: train, val"):
        ADE20K(str(tmp_path), mode="test")


@pytest.mark.parametrize("folder", ["VOC2012", "."])
def test_pascal_voc_reads_its_own_list(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "JPEGImages/a.jpg", noise())
    write(tmp_path / folder / "SegmentationClass/a.png", ids(20), "P")
    (tmp_path / folder / "ImageSets/Segmentation").mkdir(parents=True)
    (tmp_path / folder / "ImageSets/Segmentation/trainval.txt").write_text("a\n")
    data = PascalVOC(str(tmp_path), mode="trainval")
    assert len(data) == 1
    assert data.num_classes == 21
    with pytest.raises(DataError, match=r"val.txt: no such list file"):
        PascalVOC(str(tmp_path), mode="val")


def test_augmented_pascal_voc_is_train_and_then_what_was_added(tmp_path: Path) -> None:
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    for name, labels, value in (("a", "SegmentationClass", 1), ("b", "SegmentationClassAug", 2)):
        write(tmp_path / f"JPEGImages/{name}.jpg", noise())
        write(tmp_path / f"{labels}/{name}.png", ids(value), "P")
    (lists / "train.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"Segmentation/aug.txt: no such list file"):
        PascalVOC(str(tmp_path), mode="trainaug")
    (lists / "aug.txt").write_text("b\n")
    data = PascalVOC(str(tmp_path), mode="trainaug")
    assert [int(data.read(index).label.max()) for index in range(len(data))] == [1, 2]
    assert len(PascalVOC(str(tmp_path), mode="train")) == 1


def test_unknown_mode_of_pascal_voc_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown mode 'trainag'; did you mean 'trainaug'"):
        PascalVOC(str(tmp_path), mode="trainag")


def test_optic_disc_reads_the_list_of_its_mode(root: Path) -> None:
    (root / "train.txt").rename(root / "val_list.txt")
    data = OpticDiscSeg(str(root), mode="val")
    assert (len(data), data.num_classes) == (3, 2)


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_people_in_video_conferences_are_read_by_the_list_of_their_mode(root: Path, mode: str) -> None:
    (root / "train.txt").rename(root / f"{mode}.txt")
    data = PPHumanSeg14K(str(root), mode=mode)
    assert (len(data), data.num_classes, Path(data.path(0)).name) == (3, 2, "2.png")


def test_only_a_test_list_of_people_may_lack_labels(root: Path) -> None:
    for mode in ("val", "test"):
        (root / f"{mode}.txt").write_text("Images/0.png\n")
    assert PPHumanSeg14K(str(root), mode="test").read(0).label is None
    with pytest.raises(DataError, match=r"val.txt:1: 1 columns in 'Images/0.png'; a line is 'image label'"):
        PPHumanSeg14K(str(root), mode="val")


def test_lists_of_roads_have_bars_between_image_and_label(root: Path) -> None:
    (root / "val.txt").write_text("Images/1.png|Annotations/1.png\nImages/0.png|Annotations/0.png\n")
    data = MiniDeepGlobeRoadExtraction(str(root), mode="val")
    assert (len(data), data.num_classes, Path(data.path(0)).name) == (2, 2, "1.png")
    assert (data.read(0).label == 1).all()


def test_roads_have_no_test_images(root: Path) -> None:
    with pytest.raises(ValueError, match="unknown mode 'test'; allowed: train, val"):
        MiniDeepGlobeRoadExtraction(str(root), mode="test")
