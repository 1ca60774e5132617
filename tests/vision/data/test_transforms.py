"""Sizes, places and movements: image and label together, against formulas, NumPy and Pillow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import blob, coordinates, noise, smooth
from PIL import Image

from mezzo.vision.data import TRANSFORMS, DataError, Sample
from mezzo.vision.data.transforms import (
    LimitLong,
    Padding,
    PaddingByAspectRatio,
    RandomAffine,
    RandomCenterCrop,
    RandomHorizontalFlip,
    RandomPaddingCrop,
    RandomRotation,
    RandomScaleAspect,
    RandomVerticalFlip,
    Resize,
    ResizeByLong,
    ResizeByShort,
    ResizeRangeScaling,
    ResizeStepScaling,
)

NEEDED = {
    "ResizeByLong": {"long_size": 50},
    "ResizeByShort": {"short_size": 50},
    "Padding": {"target_size": [120, 110]},
}
"""Arguments of those that have no defaults for all."""

EDGE_PIXELS = 0.06  # linear image and nearest label differ by a pixel along the border of the blob


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def size_of(sample: Sample) -> tuple[int, int]:
    """Return width and height, after a look whether the label has them too."""
    assert sample.label.shape == sample.image.shape[:2]
    return sample.image.shape[1], sample.image.shape[0]


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 1000))
def test_any_size_goes_through_and_stays_in_form(name: str, width: int, height: int, seed: int) -> None:
    transform = TRANSFORMS[name](**NEEDED.get(name, {}))
    before = Sample(noise(width, height), noise(width, height)[..., 0] % 3, "x.png")
    image, label = before.image.copy(), before.label.copy()
    after = transform(before, rng(seed))
    assert after.image.dtype == (np.float32 if name == "Normalize" else np.uint8)
    assert after.image.ndim == 3
    assert after.label.dtype == np.uint8
    assert after.image.shape[:2] == after.label.shape
    assert set(np.unique(after.label)) <= {0, 1, 2, 255}
    assert after.path == "x.png"
    assert (before.image == image).all(), "the input is changed"
    assert (before.label == label).all(), "the input is changed"


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_all_that_is_random_comes_from_the_generator(name: str) -> None:
    transform = TRANSFORMS[name](**NEEDED.get(name, {}))
    first, second = (transform(coordinates(), rng(7)) for _ in range(2))
    assert (first.image == second.image).all()
    assert (first.label == second.label).all()


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_class_index_and_missing_label_stay(name: str) -> None:
    transform = TRANSFORMS[name](**NEEDED.get(name, {}))
    for label in (3, None):
        assert transform(Sample(noise(), label, ""), rng()).label is label


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - {"Normalize", "RandomDistort", "RandomBlur", "RandomNoise"}))
def test_image_and_label_move_together(name: str, seed: int) -> None:
    after = TRANSFORMS[name](**NEEDED.get(name, {}))(blob(seed=seed), rng(seed))
    counts = after.label != 255
    differs = (after.image[..., 0] > 127)[counts] != (after.label == 1)[counts]
    assert (after.label == 1).any()
    assert differs.mean() < EDGE_PIXELS


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Resize([50, 40]), (50, 40)),
        (Resize(), (512, 512)),
        (Resize([45, 45], keep_ratio=True), (45, 30)),
        (Resize([300, 40], keep_ratio=True), (60, 40)),
        (Resize([40, 300], keep_ratio=True), (60, 40)),
        (Resize([50, 40], size_divisor=32), (64, 64)),
        (Resize([64, 32], size_divisor=32), (64, 32)),
        (Resize([45, 45], keep_ratio=True, size_divisor=7), (49, 35)),
        (Resize([1, 1], keep_ratio=True, size_divisor=4), (4, 4)),
        (ResizeByLong(45), (45, 30)),
        (ResizeByShort(45), (68, 45)),
        (LimitLong(), (90, 60)),
        (LimitLong(max_long=45), (45, 30)),
        (LimitLong(max_long=90), (90, 60)),
        (LimitLong(min_long=120), (120, 80)),
        (LimitLong(max_long=200, min_long=10), (90, 60)),
        (ResizeRangeScaling(180, 180), (180, 120)),
        (ResizeStepScaling(2, 2), (180, 120)),
        (Padding([100, 70]), (100, 70)),
        (PaddingByAspectRatio(1), (90, 90)),
        (PaddingByAspectRatio(3), (180, 60)),
        (PaddingByAspectRatio(1.5), (90, 60)),
        (RandomPaddingCrop([100, 20]), (100, 20)),
        (RandomPaddingCrop([20, 100]), (20, 100)),
        (RandomCenterCrop((1, 1)), (90, 60)),
        (RandomRotation(0), (90, 60)),
        (RandomAffine([30, 50]), (30, 50)),
    ],
)
def test_result_has_the_size_asked_for(transform, expected: tuple[int, int]) -> None:
    assert size_of(transform(coordinates(), rng())) == expected


def test_resized_image_is_linear_and_its_label_nearest() -> None:
    grey = np.array([[0, 100]], np.uint8)
    after = Resize([4, 1])(Sample(np.repeat(grey[..., None], 3, 2), np.array([[1, 7]], np.uint8), ""), rng())
    assert after.image[0, :, 0].tolist() == [0, 25, 75, 100]  # centres at 0.25 and 0.75 between the two
    assert after.label.tolist() == [[1, 1, 7, 7]]


@pytest.mark.parametrize(
    ("interp", "pillow", "error"),
    [("LINEAR", "BILINEAR", 1), ("NEAREST", "NEAREST", 2), ("CUBIC", "BICUBIC", 2), ("LANCZOS4", "LANCZOS", 2)],
)
def test_enlarged_image_agrees_with_pillow(interp: str, pillow: str, error: int) -> None:
    image = smooth()
    expected = np.array(Image.fromarray(image).resize((180, 120), Image.Resampling[pillow])).astype(int)
    found = Resize([180, 120], interp=interp)(Sample(image, None, ""), rng()).image
    assert np.abs(found[8:-8, 8:-8] - expected[8:-8, 8:-8]).max() <= error


def test_random_interpolation_takes_different_ones() -> None:
    resize, before = Resize([37, 23], interp="RANDOM"), Sample(noise(), None, "")
    assert len({resize(before, rng(seed)).image.tobytes() for seed in range(40)}) == 5


def test_steps_of_scaling_are_drawn_alike() -> None:
    scaling = ResizeStepScaling(0.5, 2.0, 0.25)
    widths = [size_of(scaling(coordinates(40, 20), rng(seed)))[0] for seed in range(700)]
    values, counts = np.unique(widths, return_counts=True)
    assert values.tolist() == [20, 30, 40, 50, 60, 70, 80]
    assert counts.min() > 60  # 100 each, deviation 9


def test_steps_reach_the_largest_factor_in_spite_of_rounding() -> None:
    widths = {size_of(ResizeStepScaling(0.4, 0.7, 0.1)(coordinates(100, 20), rng(seed)))[0] for seed in range(60)}
    assert widths == {40, 50, 60, 70}


def test_scaling_without_steps_is_continuous() -> None:
    scaling = ResizeStepScaling(0.5, 1.5, 0)
    widths = [size_of(scaling(coordinates(200, 10), rng(seed)))[0] for seed in range(200)]
    assert min(widths) >= 100
    assert max(widths) <= 300
    assert np.mean(widths) == pytest.approx(200, abs=20)
    assert len(set(widths)) > 80


def test_range_scaling_stays_in_its_range() -> None:
    longs = [max(size_of(ResizeRangeScaling(40, 60)(coordinates(), rng(seed)))) for seed in range(150)]
    assert (min(longs), max(longs)) == (40, 60)


@pytest.mark.parametrize("transform", [Padding([95, 64]), RandomPaddingCrop([95, 64])])
def test_padding_lies_right_and_below(transform) -> None:
    before = coordinates()
    after = transform(before, rng())
    assert (after.image[:60, :90] == before.image).all()
    assert (after.label[:60, :90] == before.label).all()
    assert (after.image[60:] == 128).all(), "127.5 is rounded: images stay uint8"
    assert (after.image[:, 90:] == 128).all()
    assert (after.label[60:] == 255).all()
    assert (after.label[:, 90:] == 255).all()


def test_padding_takes_a_colour_and_a_class() -> None:
    after = Padding([92, 60], im_padding_value=[1, 2.4, 3], label_padding_value=9)(coordinates(), rng())
    assert (after.image[:, 90:] == [1, 2, 3]).all()
    assert (after.label[:, 90:] == 9).all()


def test_padding_refuses_a_larger_image() -> None:
    with pytest.raises(
        DataError,
        match=r"coordinates.png: the image is 90 x 60 here, larger than Padding's target_size \[80, 80\]; resize or crop",
    ):
        Padding([80, 80])(coordinates(), rng())


def test_crops_are_parts_at_every_place() -> None:
    places = set()
    for seed in range(300):
        after = RandomPaddingCrop([88, 57])(coordinates(), rng(seed))
        left, top = map(int, after.image[0, 0, :2])
        assert (after.image == coordinates().image[top : top + 57, left : left + 88]).all()
        assert (after.label == coordinates().label[top : top + 57, left : left + 88]).all()
        places.add((left, top))
    assert places == {(left, top) for left in range(3) for top in range(4)}


def halves(width: int = 40, height: int = 20) -> Sample:
    """Return a sample of class 0 at the left and 1 at the right; the image is the label."""
    label = np.zeros((height, width), np.uint8)
    label[:, width // 2 :] = 1
    return Sample(np.repeat(label[..., None], 3, 2), label, "halves.png")


def test_crop_is_drawn_until_no_class_has_too_large_a_share() -> None:
    shares = []
    for seed in range(200):
        after = RandomPaddingCrop([10, 10], category_max_ratio=0.8)(halves(), rng(seed))
        assert (after.image[..., 0] == after.label).all()
        shares.append(np.bincount(after.label.ravel(), minlength=2).max() / 100)
    # 7 of the 31 columns are good; ten draws miss them all with (24 / 31) ** 10 = 0.077
    assert np.mean(np.array(shares) > 0.8) == pytest.approx(0.077, abs=0.06)
    free = [RandomPaddingCrop([10, 10])(halves(), rng(seed)).label for seed in range(200)]
    assert np.mean([np.bincount(label.ravel()).max() > 80 for label in free]) > 0.6


def test_crop_takes_the_last_of_ten_when_none_is_mixed() -> None:
    class Counted(np.random.Generator):
        draws = 0

        def integers(self, *arguments: int) -> np.int64:
            type(self).draws += 1
            return super().integers(*arguments)

    one_class = Sample(noise(), np.zeros((60, 90), np.uint8), "x.png")
    after = RandomPaddingCrop([20, 20], category_max_ratio=0.75)(one_class, Counted(np.random.PCG64(0)))
    assert Counted.draws == 20, "ten places of two coordinates"
    assert size_of(after) == (20, 20)


def test_share_of_a_class_is_of_the_pixels_that_count() -> None:
    sample = halves()
    sample.label[:, 5:35] = 255  # what counts is half and half wherever both ends are seen
    sample.label[0, 20] = 1
    after = RandomPaddingCrop([39, 20], category_max_ratio=0.6)(sample, rng())
    assert set(np.unique(after.label)) == {0, 1, 255}
    first = RandomPaddingCrop([39, 20])(sample, rng())
    assert (after.label == first.label).all(), "the first place is good enough"


@pytest.mark.parametrize("label", [None, 3])
def test_crop_without_label_map_is_drawn_once(label: int | None) -> None:
    chosen, plain = (
        RandomPaddingCrop([20, 20], category_max_ratio=ratio)(Sample(noise(), label, ""), rng(3)) for ratio in (0.5, 1)
    )
    assert (chosen.image == plain.image).all()


def test_center_crop_keeps_the_part_it_must() -> None:
    for seed in range(200):
        after = RandomCenterCrop((0.5, 0.9))(coordinates(), rng(seed))
        width, height = size_of(after)
        assert width >= 45
        assert height >= 54
        left, top = map(int, after.image[0, 0, :2])
        assert (after.image == coordinates().image[top : top + height, left : left + width]).all()


def test_scaled_part_fills_the_image_and_shows_less() -> None:
    seen = []
    for seed in range(100):
        after = RandomScaleAspect(0.5, 0.33)(coordinates(), rng(seed))
        assert size_of(after) == (90, 60)
        seen.append(np.ptp(after.image[..., 0].astype(int)) * np.ptp(after.image[..., 1].astype(int)) / (89 * 59))
    assert 0.4 < np.mean(seen) < 0.95
    assert min(seen) > 0.4


@pytest.mark.parametrize("transform", [RandomScaleAspect(0, 0.3), RandomScaleAspect(0.5, 0), RandomRotation(0)])
def test_zero_switches_off(transform) -> None:
    assert (transform(coordinates(), rng()).image == coordinates().image).all()


@pytest.mark.parametrize(("kind", "turned"), [(RandomHorizontalFlip, np.fliplr), (RandomVerticalFlip, np.flipud)])
def test_flip_mirrors_both_with_its_probability(kind, turned) -> None:
    before = coordinates(9, 6)
    assert (kind(1)(before, rng()).image == turned(before.image)).all()
    assert (kind(1)(before, rng()).label == turned(before.label)).all()
    assert kind(1)(before, rng()).image.flags.c_contiguous
    flipped = [not (kind(0.3)(before, rng(seed)).image == before.image).all() for seed in range(1000)]
    assert np.mean(flipped) == pytest.approx(0.3, abs=0.06)  # four deviations
    assert not any((kind(0)(before, rng(seed)).image != before.image).any() for seed in range(20))


def test_flips_have_the_defaults_of_the_files() -> None:
    assert (RandomHorizontalFlip().prob, RandomVerticalFlip().prob) == (0.5, 0.1)


def test_rotation_agrees_with_pillow() -> None:
    class Fixed(np.random.Generator):
        def uniform(self, *_: object) -> float:
            return 30.0

    before = Sample(smooth(90, 60), None, "")
    after = RandomRotation(30)(before, Fixed(np.random.PCG64(0))).image.astype(int)
    grey = (128, 128, 128)
    turned = Image.fromarray(before.image).rotate(30, Image.Resampling.BILINEAR, expand=True, fillcolor=grey)
    expected = np.array(turned).astype(int)
    height, width = after.shape[:2]
    assert (width, height) == (int(60 * 0.5 + 90 * np.cos(np.pi / 6)), int(60 * np.cos(np.pi / 6) + 90 * 0.5))
    y, x = (expected.shape[0] - height) // 2, (expected.shape[1] - width) // 2
    middle = np.s_[height // 2 - 20 : height // 2 + 20, width // 2 - 20 : width // 2 + 20]
    assert np.abs(after - expected[y : y + height, x : x + width])[middle].max() <= 6  # up to half a pixel apart
    assert (after[0, 0] == 128).all(), "the corners are padded"


def test_rotation_loses_no_pixel_of_the_label() -> None:
    before = blob()
    for seed in range(10):
        after = RandomRotation(90)(before, rng(seed))
        assert (after.label == 1).sum() == pytest.approx((before.label == 1).sum(), rel=0.05)


def test_affine_without_change_is_a_resize_around_the_centre() -> None:
    affine = RandomAffine([90, 60], max_rotation=0, min_scale_factor=1, max_scale_factor=1)
    assert (affine(coordinates(), rng()).image == coordinates().image).all()


def test_affine_moves_at_most_by_its_offset() -> None:
    affine = RandomAffine([91, 61], translation_offset=10, max_rotation=0, min_scale_factor=1, max_scale_factor=1)
    dot = Sample(np.zeros((61, 91, 3), np.uint8), np.zeros((61, 91), np.uint8), "")
    dot.label[29:32, 44:47] = 1
    shifts = []
    for seed in range(60):
        rows, columns = np.nonzero(affine(dot, rng(seed)).label == 1)
        shifts.append((columns.mean() - 45, rows.mean() - 30))
    assert 7 < np.abs(shifts).max() <= 10.6
