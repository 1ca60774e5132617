"""Classification data: folders and lists."""

import re
from pathlib import Path

import pytest
from pictures import noise, write

from mezzo.data import DataError, ImageFolder, ImageList, open_classification


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, the one in the middle empty; a file that is no image."""
    for name in ("train/cat/b.JPEG", "train/cat/a.png", "train/zebra/x.Jpg", "train/zebra/y.webp", "val/cat/c.bmp"):
        write(tmp_path / name, noise())
    (tmp_path / "train/dog").mkdir()
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    (tmp_path / "train/readme.md").write_text("no folder")
    return tmp_path


def test_class_is_the_place_of_the_folder_and_empty_folders_count(folder: Path) -> None:
    data = ImageFolder(folder, "train")
    assert data.classes == ["cat", "dog", "zebra"]
    assert data.num_classes == 3
    found = [(Path(data.path(i)).name, data.read(i).label) for i in range(len(data))]
    assert found == [("a.png", 0), ("b.JPEG", 0), ("x.Jpg", 2), ("y.webp", 2)]
    assert data.read(0).image.shape == (60, 90, 3)


def test_there_may_be_more_classes_than_folders(folder: Path) -> None:
    assert ImageFolder(folder, "train", num_classes=1000).num_classes == 1000
    with pytest.raises(DataError, match="3 class folders, but num_classes=2"):
        ImageFolder(folder, "train", num_classes=2)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("", "no folder 'train'; images lie in train/CLASS/x.jpg"),
        ("train", "no class folders; images lie in train/CLASS/x.jpg"),
        ("train/cat", "no image in 1 class folders; known are .bmp, .jpeg, .jpg, .png, .webp"),
    ],
)
def test_folder_without_images_is_refused(tmp_path: Path, setup: str, message: str) -> None:
    (tmp_path / setup).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError, match=re.escape(message)):
        ImageFolder(tmp_path, "train")


def test_missing_root_is_refused() -> None:
    with pytest.raises(DataError, match="data folder 'nowhere': no such folder"):
        ImageFolder("nowhere", "train")


def test_list_gives_path_and_label(folder: Path) -> None:
    write(folder / "my images/p q.png", noise())
    (folder / "a.txt").write_text("train/cat/a.png 0\nmy images/p q.png\t7\n\n")
    data = ImageList(folder, folder / "a.txt")
    assert [(data.read(i).label, Path(data.path(i)).name) for i in range(2)] == [(0, "a.png"), (7, "p q.png")]
    assert data.num_classes == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.txt: the list is empty"),
        ("x.png 0\nx.png", "a.txt:2: one column in 'x.png'; a line is 'path label'"),
        ("x.png cat", "a.txt:1: 'cat' is no class index; a line is 'path label', the label an integer from 0"),
        ("x.png -1", "a.txt:1: '-1' is no class index"),
        ("x.png 1.0", "a.txt:1: '1.0' is no class index"),
        ("x.png \u0663", "a.txt:1: '\u0663' is no class index"),
        ("x.png 9999999999", "a.txt:1: '9999999999' is no class index"),
        ("x.png 3", "a.txt:1: label 3, but there are 3 classes (0 to 2)"),
        ("../x.png 0", "a.txt:1: '../x.png' lies outside of"),
    ],
)
def test_fault_of_a_list_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        ImageList(tmp_path, tmp_path / "a.txt", num_classes=3)


def test_missing_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("lost.png 0")
    with pytest.raises(DataError, match=r"lost.png: no such file"):
        ImageList(tmp_path, tmp_path / "a.txt").read(0)


@pytest.mark.parametrize("name", ["{}_list.txt", "{}.txt"])
def test_list_is_taken_before_the_folder(folder: Path, name: str) -> None:
    (folder / name.format("train")).write_text("train/cat/a.png 4\n")
    (folder / name.format("val")).write_text("val/cat/c.bmp 1\n")
    val = open_classification(folder, "val")
    assert isinstance(val, ImageList)
    assert len(val) == 1
    assert val.num_classes == 5, "the classes of val are those of both lists"
    assert open_classification(folder, "val", num_classes=9).num_classes == 9


def test_folder_is_taken_without_a_list(folder: Path) -> None:
    assert isinstance(open_classification(folder, "train"), ImageFolder)


def test_neither_list_nor_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"neither a list file \(val_list.txt or val.txt\) nor a folder 'val' with a folder a class"
    ):
        open_classification(tmp_path, "val")
