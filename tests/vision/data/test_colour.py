"""Colours, blur, noise and normalisation against Pillow, OpenCV and formulas."""

import colorsys

import cv2
import numpy as np
import pytest
from pictures import noise, smooth
from PIL import Image, ImageEnhance

from mezzo.vision.data import Sample
from mezzo.vision.data.transforms import Normalize, RandomBlur, RandomDistort, RandomNoise

ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
    "sharpness": ImageEnhance.Sharpness,
}
NAMES = ("brightness", "contrast", "saturation", "hue", "sharpness")
OFF = {f"{name}_prob": 0 for name in NAMES}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", ENHANCERS)
def test_one_change_is_pillows_enhancer_inside_its_range(name: str) -> None:
    before = Sample(smooth(40, 30), None, "")
    distort = RandomDistort(**(OFF | {f"{name}_prob": 1, f"{name}_range": 0.4}))
    factors = np.linspace(0.6, 1.4, 801)
    candidates = {ENHANCERS[name](Image.fromarray(before.image)).enhance(f).tobytes() for f in factors}
    near = [np.frombuffer(data, np.uint8).reshape(before.image.shape).astype(int) for data in candidates]
    for seed in range(5):
        after = distort(before, rng(seed)).image
        assert min(np.abs(after - other).max() for other in near) <= 1


def test_distortion_reaches_both_ends_of_its_range() -> None:
    grey = Sample(np.full((2, 2, 3), 100, np.uint8), None, "")
    distort = RandomDistort(**(OFF | {"brightness_prob": 1, "brightness_range": 0.4}))
    levels = [int(distort(grey, rng(seed)).image[0, 0, 0]) for seed in range(300)]
    assert 60 <= min(levels) <= 62
    assert 138 <= max(levels) <= 140


def test_each_change_has_its_probability() -> None:
    before = Sample(smooth(8, 6), None, "")
    for name in NAMES:
        distort = RandomDistort(**(OFF | {f"{name}_prob": 0.3, "hue_range": 80, "sharpness_range": 1}))
        same = [(distort(before, rng(seed)).image == before.image).all() for seed in range(400)]
        assert 0.6 < np.mean(same) < 0.8, name


def test_distortion_that_is_off_changes_nothing() -> None:
    before = Sample(noise(), None, "")
    assert (RandomDistort(**OFF)(before, rng()).image == before.image).all()


def turned(image: Image.Image, shift: float) -> Image.Image:
    """Return an image with its hues shifted, in NumPy."""
    hsv = np.array(image.convert("HSV"))
    hsv[..., 0] = np.trunc(hsv[..., 0] + shift).astype(int) % 256
    return Image.fromarray(hsv, "HSV").convert("RGB")


def test_order_is_random() -> None:
    before = Sample(smooth(20, 20), None, "")
    calls = set()
    for seed in range(200):
        names = list(rng(seed).permutation(list(NAMES)))
        calls.add(tuple(names))
        image = Image.fromarray(before.image)
        stream = rng(seed)
        stream.permutation(list(NAMES))
        for name in names:
            amount, apply = stream.uniform(-1, 1) * (18 if name == "hue" else 0.5), stream.random() < 0.5
            if apply and name != "sharpness":
                image = turned(image, amount) if name == "hue" else ENHANCERS[name](image).enhance(1 + amount)
        assert (RandomDistort()(before, rng(seed)).image == np.array(image)).all()
    assert len(calls) > 80


def test_hue_turns_around_its_circle() -> None:
    colour = (200, 40, 60)
    _, saturation, value = Image.new("RGB", (1, 1), colour).convert("HSV").getpixel((0, 0))
    distort = RandomDistort(**(OFF | {"hue_prob": 1, "hue_range": 200}))
    before = Sample(np.full((1, 1, 3), colour, np.uint8), None, "")
    circle = [
        [255 * part for part in colorsys.hsv_to_rgb(turned / 255, saturation / 255, value / 255)]
        for turned in range(256)
    ]
    found = [distort(before, rng(seed)).image[0, 0] for seed in range(300)]
    nearest = [int(np.abs(np.array(circle) - rgb).max(axis=1).argmin()) for rgb in found]
    assert all(np.abs(np.array(circle[near]) - rgb).max() <= 2 for near, rgb in zip(nearest, found, strict=True))
    assert len(set(nearest)) > 100, "all of the circle is reached"


@pytest.mark.parametrize("kind", ["gaussian", "median", "blur", "random"])
def test_blur_keeps_the_mean_and_lowers_the_contrast(kind: str) -> None:
    before = Sample(noise(), np.zeros((60, 90), np.uint8), "")
    for seed in range(8):
        after = RandomBlur(1, kind)(before, rng(seed))
        assert after.image.std() < 0.75 * before.image.std()
        assert after.image.mean() == pytest.approx(before.image.mean(), abs=6)
        assert after.label is before.label


def test_gaussian_blur_has_widths_3_to_9() -> None:
    dot = np.zeros((21, 21, 3), np.uint8)
    dot[10, 10] = 255
    results = {RandomBlur(1)(Sample(dot, None, ""), rng(seed)).image.tobytes() for seed in range(80)}
    assert results == {cv2.GaussianBlur(dot, (w, w), 0).tobytes() for w in (3, 5, 7, 9)}


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_blur_and_noise_have_their_probability(prob: float) -> None:
    before = Sample(noise(12, 9), None, "")
    for transform in (RandomBlur(prob), RandomNoise(prob)):
        changed = [not (transform(before, rng(seed)).image == before.image).all() for seed in range(400)]
        assert np.mean(changed) == pytest.approx(prob, abs=0.1)


def test_noise_has_mean_zero_and_a_deviation_up_to_its_limit() -> None:
    before = Sample(np.full((60, 90, 3), 128, np.uint8), None, "")
    deviations = []
    for seed in range(60):
        after = RandomNoise(1, max_sigma=12)(before, rng(seed)).image.astype(int) - 128
        assert abs(after.mean()) < 0.5
        deviations.append(after.std())
    assert max(deviations) < 12.5
    assert np.mean(deviations) == pytest.approx(6, abs=2)


def test_noise_stops_at_black_and_white() -> None:
    half = np.zeros((40, 40, 3), np.uint8)
    half[20:] = 255
    after = RandomNoise(1, 60)(Sample(half, None, ""), rng(1)).image
    assert after[:20].max() < 255
    assert after[20:].min() > 0


def test_normalize_is_the_formula() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = noise()
    found = Normalize(mean, std)(Sample(image, 3, "a"), rng())
    assert found.image.dtype == np.float32
    np.testing.assert_allclose(found.image, (image / 255 - np.array(mean)) / np.array(std), atol=2e-6)
    assert (found.label, found.path) == (3, "a")


@pytest.mark.parametrize("value", [0.5, [0.5], (0.5, 0.5, 0.5)])
def test_normalize_takes_one_number_or_three(value: object) -> None:
    assert Normalize(value, value) == Normalize()
    assert Normalize().mean == (0.5, 0.5, 0.5)
