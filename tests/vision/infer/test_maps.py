"""Labels at the size of the image, as evaluation makes them; colours, files and their names."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mezzo.errors import RunError
from mezzo.export import DeployError
from mezzo.vision.data import read_label
from mezzo.vision.infer.maps import class_colors, colored, cut_out, overlay, result_names, save_maps, to_labels
from mezzo.vision.train import undo_sizes

SIDE = st.integers(1, 40)
CHANGES = st.lists(st.tuples(st.just("resize"), SIDE, SIDE), max_size=3)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(256, size=shape, dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(classes=st.integers(1, 5), height=SIDE, width=SIDE, changes=CHANGES, seed=st.integers(0, 9))
def test_scores_become_the_labels_of_evaluation(
    classes: int, height: int, width: int, changes: list[tuple[str, int, int]], seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=(classes, height, width)).astype(np.float32)
    undo = [*changes, ("pad", max(1, height - 3), max(1, width - 2))]
    expected = undo_sizes(torch.from_numpy(scores)[None], undo).argmax(dim=1)[0].numpy()
    assert (to_labels(scores, undo, undo[0][1:], classes) == expected).all()


def test_scores_without_changes_are_brought_to_the_size_of_the_image() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float16)
    scores.flags.writeable = False  # as some engines give them
    expected = undo_sizes(torch.tensor(scores)[None], [("resize", 30, 20)]).argmax(dim=1)[0].numpy()
    labels = to_labels(scores, (), (30, 20), 3)
    assert labels.dtype == np.uint8
    assert (labels == expected).all()


def test_output_is_left_as_it_was() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
    before = scores.copy()
    to_labels(scores, (), (4, 4), 3)
    assert (scores == before).all()


def test_ids_take_the_nearest_value_as_torch_takes_it() -> None:
    ids = np.random.default_rng(0).integers(19, size=(48, 40)).astype(np.int64)
    expected = torch.nn.functional.interpolate(torch.tensor(ids)[None, None].float(), (101, 63), mode="nearest-exact")
    assert (to_labels(ids, [("resize", 101, 63)], (101, 63), 19) == expected[0, 0].numpy()).all()


@given(height=SIDE, width=SIDE, down=st.integers(1, 4), right=st.integers(1, 4), pad=st.integers(0, 5))
def test_ids_come_back_through_enlarging_and_padding(height: int, width: int, down: int, right: int, pad: int) -> None:
    ids = np.random.default_rng(0).integers(7, size=(height, width), dtype=np.int32)
    large = ids.repeat(down, axis=0).repeat(right, axis=1)
    undo = [("resize", height, width), ("pad", *large.shape)]
    labels = to_labels(np.pad(large, (0, pad), constant_values=6), undo, (height, width), 7)
    assert labels.dtype == np.uint8
    assert (labels == ids).all()


def test_more_than_256_classes_are_32_bit_ids() -> None:
    assert to_labels(np.full((2, 2), 300), (), (2, 2), 301).dtype == np.int32
    scores = np.zeros((301, 2, 2), np.float32)
    scores[300] = 1
    labels = to_labels(scores, (), (2, 2), 301)
    assert labels.dtype == np.int32
    assert (labels == 300).all()


@pytest.mark.parametrize("wrong", [-1, 2, 300])
def test_id_that_is_no_class_is_an_error(wrong: int) -> None:
    with pytest.raises(DeployError) as error:
        to_labels(np.array([[0, wrong]]), (), (1, 2), 2)
    assert str(error.value) == f"the network gives class {wrong}, but the model has 2 (0 to 1)"


def test_scores_of_another_number_of_classes_are_an_error() -> None:
    with pytest.raises(DeployError) as error:
        to_labels(np.zeros((3, 4, 4), np.float32), (), (4, 4), 2)
    assert str(error.value) == "the network gives scores of 3 classes, but the model has 2"


@pytest.mark.parametrize("output", [np.zeros((4, 4), np.float32), np.zeros((2, 4, 4), np.int64), np.zeros(4, np.int64)])
def test_output_that_is_no_segmentation_is_an_error(output: np.ndarray) -> None:
    with pytest.raises(DeployError) as error:
        to_labels(output, (), (4, 4), 2)
    assert str(error.value) == (
        f"the network gives {output.dtype} {output.shape} for an image; segmentation gives "
        "whole class ids (height, width) or float scores (classes, height, width)"
    )


@given(count=st.integers(1, 256))
def test_colours_are_distinct_begin_with_black_and_do_not_depend_on_the_count(count: int) -> None:
    colours = class_colors(count)
    assert colours.shape == (count, 3)
    assert len({tuple(colour) for colour in colours.tolist()}) == count
    assert not colours[0].any()
    assert (colours == class_colors(1000)[:count]).all()


def test_colours_are_those_of_pascal_voc() -> None:
    expected = {0: (0, 0, 0), 5: (128, 0, 128), 8: (64, 0, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {index: tuple(class_colors(21)[index].tolist()) for index in expected} == expected
    assert class_colors(256)[255].tolist() == [224, 224, 192]


def test_overlay_leaves_the_background_of_a_person_untouched_and_mixes_the_rest() -> None:
    image, labels = noise(4, 6, 3), np.arange(24, dtype=np.uint8).reshape(4, 6) % 2
    shown = overlay(image, labels, num_classes=2, alpha=0.25)
    person = labels == 1
    assert (shown[~person] == image[~person]).all()
    expected = 0.75 * image[person] + 0.25 * np.array([128, 0, 0])
    assert np.abs(shown[person] - expected).max() <= 0.5


def test_overlay_of_many_classes_colours_class_0_too() -> None:
    image, labels = noise(4, 6, 3), np.zeros((4, 6), np.uint8)
    assert np.abs(overlay(image, labels, num_classes=3) - 0.4 * image).max() <= 0.5


def test_coloured_labels_are_the_colours_of_their_classes() -> None:
    assert colored(np.array([[0, 2], [1, 0]], np.uint8)).tolist() == [
        [[0, 0, 0], [0, 128, 0]],
        [[128, 0, 0], [0, 0, 0]],
    ]


def test_cut_out_keeps_the_person_and_nothing_of_the_background() -> None:
    image, labels = noise(4, 6, 3), np.arange(24, dtype=np.uint8).reshape(4, 6) % 3
    cut = cut_out(image, labels, person=2)
    inside = labels == 2
    assert (cut[inside][:, :3] == image[inside]).all()
    assert (cut[inside][:, 3] == 255).all()
    assert not cut[~inside].any()


@pytest.mark.parametrize("num_classes", [2, 19, 256])
def test_label_file_has_ids_to_read_and_colours_to_see(tmp_path: Path, num_classes: int) -> None:
    labels = (np.arange(5 * 7).reshape(5, 7) % num_classes).astype(np.uint8)
    labels[0, 0] = num_classes - 1
    written = save_maps(tmp_path, Path("sub", "a"), noise(5, 7, 3), labels, num_classes=num_classes, with_cut_out=False)
    assert written == [tmp_path / "labels" / "sub" / "a.png", tmp_path / "overlays" / "sub" / "a.jpg"]
    assert (read_label(written[0]) == labels).all()
    assert (np.array(Image.open(written[0]).convert("RGB")) == colored(labels)).all()


def test_label_file_of_more_than_256_classes_has_16_bits(tmp_path: Path) -> None:
    labels = np.array([[0, 999]], np.int32)
    written = save_maps(tmp_path, Path("a"), noise(1, 2, 3), labels, num_classes=1000, with_cut_out=False)
    assert cv2.imread(str(written[0]), cv2.IMREAD_UNCHANGED).tolist() == [[0, 999]]


def test_overlay_and_cut_out_files_show_what_they_are_named_after(tmp_path: Path) -> None:
    image = np.full((16, 16, 3), (200, 120, 40), np.uint8)
    labels = np.zeros((16, 16), np.uint8)
    labels[:, 8:] = 1
    _, shown, alone = save_maps(tmp_path, Path("v1.2"), image, labels, num_classes=2, with_cut_out=True)
    assert (shown.name, alone) == ("v1.2.jpg", tmp_path / "cutouts" / "v1.2.png")
    assert np.abs(np.array(Image.open(shown)).astype(int) - overlay(image, labels, num_classes=2)).max() <= 12  # JPEG
    assert (np.array(Image.open(alone)) == cut_out(image, labels)).all()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["v1.2.jpg", "v1.2.png", "v1.2.png"]


@pytest.mark.parametrize("name", ["../a", "/a"])
def test_name_that_leaves_the_folder_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: results are named by a path inside of their folder$"):
        save_maps(tmp_path, Path(name), noise(2, 2, 3), np.zeros((2, 2), np.uint8), num_classes=2, with_cut_out=False)


def test_picture_that_is_too_wide_for_a_file_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    labels = np.zeros((1, 70_000), np.uint8)
    with pytest.raises(RunError) as error:
        save_maps(tmp_path, Path("a"), noise(1, 70_000, 3), labels, num_classes=2, with_cut_out=False)
    assert str(error.value) == "a: a picture of 70000 x 1 cannot be encoded as .jpg"
    assert not list(tmp_path.iterdir())


def names_of(images: list[str], source: Path, root: Path) -> list[str]:
    return [name.as_posix() for name in result_names([root / image for image in images], source)]


def test_results_keep_the_folders_below_the_source(tmp_path: Path) -> None:
    assert names_of(["x/a.jpg", "y/a.jpg"], tmp_path, tmp_path) == ["x/a", "y/a"]
    assert names_of(["x/a.jpg"], tmp_path, tmp_path) == ["x/a"]
    assert names_of(["a.jpg"], tmp_path / "a.jpg", tmp_path) == ["a"]


def test_suffix_stays_where_names_would_be_the_same_without_it(tmp_path: Path) -> None:
    images = ["a.jpg", "a.png", "b.jpg", "c", "c.jpg"]
    assert names_of(images, tmp_path, tmp_path) == ["a.jpg", "a.png", "b", "c", "c.jpg"]


def test_image_that_a_list_names_twice_has_one_name(tmp_path: Path) -> None:
    assert names_of(["a.jpg", "a.jpg"], tmp_path / "val.txt", tmp_path) == ["a", "a"]


def test_images_outside_of_the_folder_of_their_list_are_named_from_their_common_folder(tmp_path: Path) -> None:
    images = ["lists/../x/a.jpg", "y/b.jpg"]
    assert names_of(images, tmp_path / "lists" / "val.txt", tmp_path) == ["x/a", "y/b"]


NAMES = st.lists(st.sampled_from(["a", "b", ".jpg", ".png", "/"]), min_size=1, max_size=5).map("".join)
IMAGES = st.lists(NAMES.map(lambda name: f"{name.strip('/')}.png"), min_size=1, max_size=8, unique_by=Path)


@given(images=IMAGES)
def test_no_two_images_have_the_same_name(images: list[str]) -> None:
    names = names_of(images, Path("list.txt"), Path())
    assert len(set(names)) == len(images)
    assert not any(name.startswith(("/", "..")) for name in names)


@pytest.mark.parametrize("name", ["..png", "...png", "x/...jpg", "a\nb\x1b[31m.png"])
def test_an_image_with_an_odd_name_is_written_inside_like_any_other(tmp_path: Path, name: str) -> None:
    (result,) = result_names([tmp_path / "in" / name], tmp_path / "in")
    out = tmp_path / "out"
    labels = np.zeros((2, 2), np.uint8)
    files = save_maps(out, result, noise(2, 2, 3), labels, num_classes=2, with_cut_out=False)
    assert all(file.is_file() and file.resolve().is_relative_to(out.resolve()) for file in files)


def test_class_ids_of_a_hostile_network_take_no_table_of_all_classes(tmp_path: Path) -> None:
    labels = np.array([[0, 2**31 - 1]], np.int32)
    assert colored(labels).shape == (1, 2, 3)
    assert colored(labels)[0, 0].tolist() == [0, 0, 0]
    with pytest.raises(DeployError, match="2147483647"):
        save_maps(tmp_path, Path("a"), noise(1, 2, 3), labels, num_classes=2**31, with_cut_out=False)
    assert not list(tmp_path.iterdir())
