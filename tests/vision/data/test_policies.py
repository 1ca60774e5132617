"""Automatic augmentation: the operations against NumPy, the policies against their tables."""

import numpy as np
import pytest
from pictures import coordinates, noise, smooth
from PIL import Image

from mezzo.vision.data import AutoAugment, Sample
from mezzo.vision.data._policies import CHOICES, OPERATIONS, PAIRS, POLICIES, STRONGEST, STRONGEST_WIDE


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def apply(name: str, strength: float, image: np.ndarray) -> np.ndarray:
    return np.array(OPERATIONS[name](Image.fromarray(image), strength))


@pytest.mark.parametrize(
    ("name", "strength", "formula"),
    [
        ("Identity", 1, lambda x: x),
        ("Invert", 0, lambda x: 255 - x),
        ("Posterize", 3, lambda x: x & 0b11111000),
        ("Posterize", 0, lambda x: x),
        ("Solarize", 0, lambda x: x),
        ("Solarize", 256, lambda x: 255 - x),
        ("Solarize", 100, lambda x: np.where(x >= 156, 255 - x, x)),
        ("Brightness", -1, lambda x: x * 0),
        ("Color", 0, lambda x: x),
    ],
)
def test_operation_is_its_formula(name: str, strength: float, formula) -> None:
    image = noise()
    assert (apply(name, strength, image) == formula(image)).all()


def test_translation_moves_right_and_down_and_leaves_black() -> None:
    image = coordinates().image
    moved = apply("TranslateX", 7, image)
    assert (moved[:, 7:] == image[:, :-7]).all()
    assert (moved[:, :7] == 0).all()
    moved = apply("TranslateY", -5, image)
    assert (moved[:-5] == image[5:]).all()
    assert (moved[-5:] == 0).all()


def test_shear_moves_rows_in_proportion() -> None:
    sheared = apply("ShearX", 0.5, coordinates().image)
    for row in (0, 10, 30):
        assert sheared[row, 5, 0] == pytest.approx(5 + row * 0.5, abs=1)


def test_auto_contrast_and_equalize_use_the_whole_range() -> None:
    for name in ("AutoContrast", "Equalize"):
        after = apply(name, 0, smooth() // 3 + 60)
        assert after.min() == 0
        assert after.max() == 255


def test_tables_are_complete() -> None:
    assert len(PAIRS) == 25
    assert {name for pair in PAIRS for name, _, _ in pair} <= set(OPERATIONS)
    assert all(0 <= prob <= 1 and 0 <= level <= 9 for pair in PAIRS for _, prob, level in pair)
    assert len(CHOICES) == 14
    assert set(STRONGEST) == set(STRONGEST_WIDE) < set(CHOICES)


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_changes_images_keeps_form_and_follows_the_generator(policy: str) -> None:
    before = Sample(smooth(48, 40), 3, "p")
    original = before.image.copy()
    results = [AutoAugment(policy)(before, rng(seed)) for seed in range(40)]
    assert all(r.image.shape == (40, 48, 3) and r.image.dtype == np.uint8 and r.label == 3 for r in results)
    assert sum((r.image != original).any() for r in results) > 20
    assert (results[5].image == AutoAugment(policy)(before, rng(5)).image).all()
    assert (before.image == original).all()


def drawn(policy: str, runs: int = 1500) -> list[list[tuple[str, float]]]:
    own = AutoAugment(policy)
    return [POLICIES[policy](own, (100, 200), rng(seed)) for seed in range(runs)]


def test_rand_augment_draws_two_of_fourteen_at_one_level() -> None:
    found = drawn("ra")
    assert {len(ops) for ops in found} == {2}
    strengths = dict(op for ops in found for op in ops)
    assert set(strengths) == set(CHOICES)
    assert strengths["Rotate"] == pytest.approx(30 * 9 / 30)
    assert strengths["TranslateX"] == pytest.approx(150 / 331 * 100 * 9 / 30)
    assert strengths["TranslateY"] == pytest.approx(150 / 331 * 200 * 9 / 30)


def test_trivial_augment_draws_one_at_any_level() -> None:
    found = [ops for (ops,) in drawn("ta_wide")]
    rotations = {round(value, 6) for name, value in found if name == "Rotate"}
    assert max(rotations) == pytest.approx(135)
    assert len(rotations) > 25
    assert max(value for name, value in found if name == "TranslateX") == 32


def test_auto_augment_follows_its_probabilities() -> None:
    found = drawn("imagenet")
    expected = np.mean([prob for pair in PAIRS for _, prob, _ in pair]) * 2
    assert np.mean([len(ops) for ops in found]) == pytest.approx(expected, abs=0.1)
