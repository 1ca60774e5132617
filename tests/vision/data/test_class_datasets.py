"""Classification data: folders and lists."""

import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import noise, write

from mezzo.vision.data import DataError, ImageFolder, ImageList, has_split, open_classification


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, the one in the middle empty; a file that is not an image."""
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


def test_val_has_the_indices_of_train_although_it_lacks_classes(folder: Path) -> None:
    write(folder / "val/zebra/z.png", noise())
    data = ImageFolder(folder, "val")
    assert (data.classes, data.num_classes) == (["cat", "dog", "zebra"], 3)
    assert [(Path(data.path(i)).name, data.read(i).label) for i in range(len(data))] == [("c.bmp", 0), ("z.png", 2)]


def test_val_alone_numbers_its_own_folders(folder: Path) -> None:
    (folder / "train").rename(folder / "elsewhere")
    write(folder / "val/zebra/z.png", noise())
    data = ImageFolder(folder, "val", num_classes=7)
    assert (data.classes, data.num_classes, data.read(1).label) == (["cat", "zebra"], 7, 1)


def test_class_of_val_that_train_lacks_is_named(folder: Path) -> None:
    (folder / "val/yak").mkdir()
    message = f"{folder}/val/yak: {folder}/train has no class 'yak'; add the folder there or remove this one"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_classification(folder, "val")
    assert len(ImageFolder(folder, "train")) == 4, "train does not depend on val"


@pytest.mark.parametrize("hidden", ["train/.cache", "val/.ipynb_checkpoints"])
def test_folders_that_begin_with_a_dot_are_no_classes(folder: Path, hidden: str) -> None:
    write(folder / hidden / "h.png", noise())
    for split, count in (("train", 4), ("val", 1)):
        data = ImageFolder(folder, split)
        assert (data.classes, len(data)) == (["cat", "dog", "zebra"], count)


def test_val_beside_a_train_folder_without_classes_is_refused(folder: Path) -> None:
    (folder / "train").rename(folder / "elsewhere")
    (folder / "train").mkdir()
    with pytest.raises(DataError, match=r"train: no class folders; images lie in train/CLASS/x.jpg"):
        ImageFolder(folder, "val")


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.data())
def test_a_class_has_one_index_in_all_splits(train: set[str], data: st.DataObject) -> None:
    val = data.draw(st.sets(st.sampled_from(sorted(train)), min_size=1))
    with tempfile.TemporaryDirectory() as folder:
        for split, names in (("train", train), ("val", val)):
            for name in names:
                path = Path(folder, split, name, "x.png")
                path.parent.mkdir(parents=True)
                path.touch()
        found = [dict((Path(p).parent.name, i) for p, i in ImageFolder(folder, s).entries) for s in ("train", "val")]
    assert found[0] == {name: place for place, name in enumerate(sorted(train))}
    assert found[1] == {name: found[0][name] for name in val}


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
        ("x.png cat", "a.txt:1: 'cat' is not a class index; a line is 'path label', the label an integer from 0"),
        ("x.png -1", "a.txt:1: '-1' is not a class index"),
        ("x.png 1.0", "a.txt:1: '1.0' is not a class index"),
        ("x.png \u0663", "a.txt:1: '\u0663' is not a class index"),
        ("x.png 9999999999", "a.txt:1: '9999999999' is not a class index"),
        ("x.png 3", "a.txt:1: label 3, but there are 3 classes (0 to 2)"),
        ("x\0.png 0", "a.txt:1: 'x\\x00.png' is not a file name"),
    ],
)
def test_fault_of_a_list_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        ImageList(tmp_path, tmp_path / "a.txt", num_classes=3)


def test_list_may_name_images_outside_of_the_root(folder: Path) -> None:
    (folder / "a.txt").write_text(f"../train/cat/a.png 0\n{folder}/train/zebra/x.Jpg 1\n")
    data = ImageList(folder / "val", folder / "a.txt")
    assert [data.read(i).image.shape for i in range(2)] == [(60, 90, 3)] * 2


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


@pytest.mark.parametrize("name", ["val_list.txt", "val.txt", "val/"])
def test_split_is_there_by_list_or_by_folder(tmp_path: Path, name: str) -> None:
    assert not has_split(tmp_path, "val")
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    assert has_split(tmp_path, "val")
    assert has_split(str(tmp_path), "val")
    assert not has_split(tmp_path, "train")
    assert not has_split(tmp_path / "gone", "val")


def test_a_pipe_named_as_an_image_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write(tmp_path / "train" / "cat" / "a.png", noise())
    os.mkfifo(tmp_path / "train" / "cat" / "b.jpg")
    with pytest.raises(DataError, match=r"cat/b\.jpg: is a named pipe, not a file"):
        ImageFolder(tmp_path)
    os.mkfifo(tmp_path / "list.txt")
    with pytest.raises(DataError, match=r"list\.txt: is a named pipe"):
        ImageList(tmp_path, tmp_path / "list.txt")


def test_a_device_in_a_list_is_refused_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("/dev/zero 0\n")
    with pytest.raises(DataError, match="/dev/zero: is a device"):
        ImageList(tmp_path, tmp_path / "list.txt").read(0)
