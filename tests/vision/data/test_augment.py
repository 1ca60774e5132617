"""Transforms for classification against Pillow and formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import coordinates, noise, smooth
from PIL import Image

from mezzo.vision.data import CenterCrop, RandomCrop, RandomErase, RandomResizedCrop, ResizeShort, Sample


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 120), st.integers(1, 120), st.integers(1, 64), st.integers(0, 99))
def test_crops_give_a_square_of_any_image(width: int, height: int, size: int, seed: int) -> None:
    for transform in (RandomResizedCrop(size), CenterCrop(size), RandomCrop(size, 4)):
        after = transform(Sample(noise(width, height), 5, "p"), rng(seed))
        assert after.image.shape == (size, size, 3)
        assert after.image.dtype == np.uint8
        assert (after.label, after.path) == (5, "p")


def test_whole_image_resized_agrees_with_pillow() -> None:
    crop = RandomResizedCrop(40, scale=(1, 1), ratio=(1, 1))
    image = smooth(80, 80)
    expected = np.array(Image.fromarray(image).resize((40, 40), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(crop(Sample(image, 0, ""), rng()).image - expected).max() <= 3


def test_shrinking_averages_fine_texture() -> None:
    stripes = np.zeros((80, 80, 3), np.uint8)
    stripes[:, ::4] = 200
    assert np.abs(ResizeShort(20)(Sample(stripes, 0, ""), rng()).image.astype(int) - 50).max() <= 1


def test_drawn_parts_have_the_area_and_shape_asked_for() -> None:
    before = Sample(np.zeros((240, 240, 3), np.uint8), 0, "")
    erase = RandomErase(1, scale=(0.02, 0.3), ratio=(0.5, 2), fill="noise")  # every drawn part fits
    sides = []
    for seed in range(600):
        rows, columns = np.nonzero((erase(before, rng(seed)).image != before.image).any(2))
        sides.append((np.ptp(rows) + 1, np.ptp(columns) + 1))
    height, width = np.array(sides, float).T
    part, ratio = height * width / 240**2, height / width
    assert part.min() > 0.019
    assert part.max() < 0.305
    assert part.mean() == pytest.approx(0.16, abs=0.02)
    assert ratio.min() > 0.48
    assert ratio.max() < 2.08
    assert np.log(ratio).mean() == pytest.approx(0, abs=0.05), "wide and high ones are as frequent"


def test_crop_shows_a_part_of_the_image() -> None:
    covered = []
    for seed in range(100):
        image = RandomResizedCrop(50)(coordinates(), rng(seed)).image.astype(int)
        covered.append((np.ptp(image[..., 0]) + 1) * (np.ptp(image[..., 1]) + 1) / (90 * 60))
    assert min(covered) < 0.25
    assert max(covered) > 0.8


def test_part_that_never_fits_becomes_the_middle() -> None:
    strip = Sample(coordinates(200, 4).image, 0, "")
    image = RandomResizedCrop(4, scale=(1, 1))(strip, rng()).image
    assert 95 <= image[..., 0].mean() <= 104


@pytest.mark.parametrize(("size", "expected"), [(30, (30, 45)), (60, (60, 90)), (120, (120, 180))])
def test_short_side_gets_its_length(size: int, expected: tuple[int, int]) -> None:
    assert ResizeShort(size)(coordinates(), rng()).image.shape[:2] == expected


def test_center_crop_takes_the_middle() -> None:
    image = CenterCrop(20)(coordinates(), rng()).image
    assert (image == coordinates().image[20:40, 35:55]).all()


def test_center_crop_of_a_small_image_is_surrounded_by_black() -> None:
    image = CenterCrop(10)(Sample(np.full((6, 6, 3), 9, np.uint8), 0, ""), rng()).image
    assert (image[2:8, 2:8] == 9).all()
    assert image.sum() == 6 * 6 * 3 * 9


def test_random_crop_reaches_all_places_of_the_padded_image() -> None:
    before = Sample(np.full((32, 32, 3), 9, np.uint8), 0, "")
    areas = {int((RandomCrop(32, 4)(before, rng(seed)).image[..., 0] > 0).sum()) for seed in range(500)}
    assert areas == {(32 - x) * (32 - y) for x in range(5) for y in range(5)}


@pytest.mark.parametrize("fill", ["mean", "noise"])
def test_erased_part_is_a_rectangle_of_allowed_area(fill: str) -> None:
    before = Sample(smooth(64, 64), 1, "")
    kept = before.image.copy()
    for seed in range(60):
        after = RandomErase(1, fill=fill)(before, rng(seed)).image
        rows, columns = np.nonzero((after != before.image).any(2))
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1) / 64**2
        assert 0.01 < area < 0.36
        if fill == "mean":
            inside = after[rows, columns]
            assert (inside == np.rint(before.image.mean(axis=(0, 1)))).all()
    assert (before.image == kept).all()


def test_erasing_has_its_probability() -> None:
    before = Sample(noise(32, 32), 1, "")
    changed = [RandomErase(0.25)(before, rng(seed)) is not before for seed in range(1000)]
    assert np.mean(changed) == pytest.approx(0.25, abs=0.06)


def test_image_of_one_pixel_is_left_alone() -> None:
    before = Sample(noise(1, 1), 1, "")
    assert RandomErase(1)(before, rng()) is before
