"""Images found, read and normalised: order, sizes and numbers; what cannot be used is one line."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mezzo.vision.data import CenterCrop, Compose, DataError, Normalize, ResizeShort, ToInput, read_image
from mezzo.vision.data.transforms import Padding, Resize
from mezzo.vision.infer import InputBatch, Refused, find_images, read_inputs, to_planes

ATOL = 1e-6  # float32 sums near 2.6; the orders of rounding differ
IMAGENET = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def picture(path: Path, width: int = 8, height: int = 6, seed: int = 0) -> Path:
    """Write an image of random grey levels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "PNG")
    return path


def listing(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_file_stands_for_itself_whatever_its_suffix(tmp_path: Path) -> None:
    path = picture(tmp_path / "scan.dat")
    assert find_images(path) == [path]


def test_folder_gives_all_images_below_it_sorted_and_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "sub/deep/c.webp", "sub/a.jpeg", ".hidden.png", ".cache/x.png"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("a.jpg")
    (tmp_path / "folder.png").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)]
    assert found == ["a.jpg", "b.PNG", "sub/a.jpeg", "sub/deep/c.webp"]


@pytest.mark.parametrize("line", ["Images/a.png", "Images/a.png Labels/a.png", "Images/a.png,3", "Images/a.png\t, 3 4"])
@pytest.mark.parametrize("name", ["val.txt", "val.list", "VAL.TXT"])
def test_first_column_of_a_list_is_relative_to_its_folder(tmp_path: Path, name: str, line: str) -> None:
    path = picture(tmp_path / "Images" / "a.png")
    assert find_images(listing(tmp_path / name, "", line, "   ", line)) == [path, path]


@pytest.mark.parametrize("line", ["my cat, old.png", "my cat, old.png 3"])
def test_path_in_a_list_may_hold_blanks_and_commas(tmp_path: Path, line: str) -> None:
    path = picture(tmp_path / "my cat, old.png")
    assert find_images(listing(tmp_path / "val.txt", line)) == [path]


def test_list_may_name_files_outside_of_its_folder(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    (tmp_path / "lists").mkdir()
    found = find_images(listing(tmp_path / "lists" / "val.txt", "../a.png", str(path)))
    assert [os.path.normpath(each) for each in found] == [str(path)] * 2


def test_missing_source_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        find_images(tmp_path / "no")
    assert str(error.value) == f"{tmp_path / 'no'}: no such file or folder"


def test_folder_without_images_is_one_line_with_the_known_suffixes(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        find_images(tmp_path)
    assert str(error.value) == f"{tmp_path}: no image in the folder or below; known are .bmp, .jpeg, .jpg, .png, .webp"


def test_folder_that_cannot_be_read_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError) as error:
        find_images(tmp_path)
    assert str(error.value) == f"{tmp_path}: the folder cannot be read (Permission denied)"


def test_empty_list_is_one_line(tmp_path: Path) -> None:
    path = listing(tmp_path / "val.txt", "", "  ")
    with pytest.raises(DataError) as error:
        find_images(path)
    assert str(error.value) == f"{path}: the list is empty"


def test_listed_file_that_is_not_there_is_named_with_its_line(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    path = listing(tmp_path / "val.txt", "a.png", "", "b.png labels/b.png")
    with pytest.raises(DataError) as error:
        find_images(path)
    assert str(error.value) == f"{path}:3: {tmp_path / 'b.png'}: no such file"


def test_line_without_a_file_name_is_one_line(tmp_path: Path) -> None:
    path = listing(tmp_path / "val.txt", ", 3")
    with pytest.raises(DataError) as error:
        find_images(path)
    assert str(error.value) == f"{path}:1: '' is not a file name"


@pytest.mark.parametrize("normalize", [IMAGENET, Normalize(), None], ids=["imagenet", "half", "none"])
def test_numbers_are_those_that_the_network_was_trained_with(normalize: Normalize | None) -> None:
    images = np.random.default_rng(0).integers(256, size=(3, 37, 53, 3), dtype=np.uint8)
    planes = to_planes(list(images), normalize)
    expected = ToInput(normalize, torch.device("cpu"))(torch.from_numpy(images)).numpy()
    assert planes.dtype == np.float32
    assert planes.flags.c_contiguous
    np.testing.assert_allclose(planes, expected, rtol=0, atol=ATOL)


def test_every_grey_level_is_normalised_by_the_formula() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    for channel in range(3):
        expected = (levels[..., channel] / 255 - IMAGENET.mean[channel]) / IMAGENET.std[channel]
        np.testing.assert_allclose(to_planes([levels], IMAGENET)[0, channel], expected, rtol=0, atol=ATOL)


def test_floats_of_an_earlier_normalize_only_change_their_layout(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    chain = Compose([Normalize(), Padding((10, 9), 0)], image_only=True)
    (batch,) = read_inputs([path], chain, 1)
    assert isinstance(batch, InputBatch)
    expected = (read_image(path) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(batch.images[0, :, :6, :8], expected.transpose(2, 0, 1), rtol=0, atol=ATOL)
    assert not batch.images[0, :, 6:].any()


def test_batch_has_originals_and_what_undoes_the_size(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{seed}.png", 8, 6, seed) for seed in range(2)]
    chain = Compose([Resize((20, 10)), Padding((32, 32)), IMAGENET], image_only=True)
    (batch,) = read_inputs(paths, chain, 4)
    assert isinstance(batch, InputBatch)
    assert batch.images.shape == (2, 3, 32, 32)
    assert batch.undo == [(("resize", 6, 8), ("pad", 10, 20))] * 2
    for path, original in zip(paths, batch.originals, strict=True):
        assert (original == np.array(Image.open(path))).all()


def test_transforms_of_a_classifier_work_as_well(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 30, 20)
    (batch,) = read_inputs([path], Compose([ResizeShort(16), CenterCrop(12), IMAGENET]), 1)
    assert isinstance(batch, InputBatch)
    assert batch.images.shape == (1, 3, 12, 12)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(["small", "large", "bad"]), max_size=12), batch_size=st.integers(1, 4))
def test_batches_keep_the_order_and_never_mix_sizes(tmp_path: Path, kinds: list[str], batch_size: int) -> None:
    (tmp_path / "bad").write_bytes(b"no image")
    picture(tmp_path / "small", 4, 3)
    picture(tmp_path / "large", 5, 4)
    wide = {"small": 4, "large": 5}
    seen: list[str] = []
    for item in read_inputs([tmp_path / kind for kind in kinds], Compose([], image_only=True), batch_size):
        if isinstance(item, Refused):
            seen.append(item.path.name)
            continue
        assert 1 <= len(item.paths) == len(item.originals) == len(item.undo) == len(item.images) <= batch_size
        assert {wide[path.name] for path in item.paths} == {item.images.shape[3]}
        seen += [path.name for path in item.paths]
    assert seen == kinds


def test_images_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    asked: list[int] = []

    def paths():
        for number in range(9):
            asked.append(number)
            yield picture(tmp_path / f"{number}.png")

    batches = read_inputs(paths(), Compose([]), 2)
    assert asked == []
    next(batches)
    assert asked == [0, 1]


def test_image_that_cannot_be_decoded_is_refused_in_its_place_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = picture(tmp_path / "a.png")
    bad = tmp_path / "b.png"
    bad.write_bytes(b"")
    first, refused, missing, last = read_inputs([good, bad, tmp_path / "c.png", good], Compose([]), 8)
    assert refused == Refused(bad, "the file is empty")
    assert missing == Refused(tmp_path / "c.png", "no such file")
    assert isinstance(first, InputBatch)
    assert isinstance(last, InputBatch)


def test_image_that_a_transform_cannot_take_is_refused(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 8, 6)
    (refused,) = read_inputs([path], Compose([Padding((4, 4))], image_only=True), 1)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("the image is 8 x 6 here, larger than Padding's target_size [4, 4]")


def test_batch_of_nothing_is_an_error_before_any_image_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^batch_size=0: must be at least 1$"):
        read_inputs([], Compose([]), 0)


def test_pipes_are_refused_at_once_as_source_as_list_and_in_a_list(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    os.mkfifo(tmp_path / "a.txt")
    lines = listing(tmp_path / "list.txt", "a.png 0")
    for source, named in (("a.png", "a.png"), ("a.txt", "a.txt"), (lines.name, "list.txt:1: .*a.png")):
        with pytest.raises(DataError, match=f"{named}: is a named pipe"):
            find_images(tmp_path / source)
    with pytest.raises(DataError, match="/dev/zero: is a device"):
        find_images(Path("/dev/zero"))


def test_a_pipe_in_a_folder_is_refused_by_its_name_and_the_others_go_on(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    first, refused = read_inputs(find_images(tmp_path), Compose([Normalize()], image_only=True), batch_size=4)
    assert isinstance(first, InputBatch)
    assert isinstance(refused, Refused)
    assert str(refused) == f"{tmp_path / 'b.png'}: is a named pipe, not a file; give a regular file"
