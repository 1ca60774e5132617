"""Chains of transforms."""

import pickle

import numpy as np
import pytest
from pictures import coordinates

from mezzo.vision.data import AutoAugment, CenterCrop, Compose, Normalize, RandomErase, Transform
from mezzo.vision.data.transforms import (
    Padding,
    RandomAffine,
    RandomBlur,
    RandomCenterCrop,
    RandomDistort,
    RandomHorizontalFlip,
    RandomNoise,
    RandomPaddingCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ResizeByLong,
    ResizeStepScaling,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_normalize_at_the_end_is_left_to_the_device() -> None:
    flip, normalize = RandomHorizontalFlip(1), Normalize()
    chain = Compose([flip, normalize])
    assert chain.on_host == (flip,)
    assert chain.normalize is normalize
    after = chain(coordinates(), rng())
    assert after.image.dtype == np.uint8
    assert (after.image == coordinates().image[:, ::-1]).all()


@pytest.mark.parametrize("transforms", [[], [RandomHorizontalFlip(0)]])
def test_chain_without_normalize_leaves_nothing(transforms: list) -> None:
    chain = Compose(transforms)
    assert chain.normalize is None
    assert (chain(coordinates(), rng()).image == coordinates().image).all()


def test_transforms_follow_each_other_and_share_the_generator() -> None:
    first, second = RandomHorizontalFlip(0.5), RandomHorizontalFlip(0.5)
    for seed in range(20):
        draws = np.random.default_rng(seed).random(2) < 0.5
        flipped = draws[0] ^ draws[1]
        after = Compose([first, second])(coordinates(), np.random.default_rng(seed))
        assert (after.image[0, 0, 0] == 89) == flipped


FLOATS = [
    Resize([30, 20]),
    ResizeByLong(40),
    ResizeStepScaling(),
    Padding([100, 100]),
    RandomPaddingCrop([64, 64]),
    RandomCenterCrop(),
    RandomHorizontalFlip(1),
    RandomVerticalFlip(1),
    RandomRotation(),
    RandomAffine(),
    CenterCrop(40),
]


@pytest.mark.parametrize("transform", FLOATS, ids=lambda transform: type(transform).__name__)
def test_normalize_in_the_middle_stays_on_the_host(transform: Transform) -> None:
    chain = Compose([Normalize(), transform])
    assert chain.normalize is None
    after = chain(coordinates(), rng())
    assert after.image.dtype == np.float32
    assert after.image.min() >= -1


@pytest.mark.parametrize(
    "transform", [RandomDistort(), RandomBlur(), RandomNoise(), Normalize(), AutoAugment(), RandomErase()]
)
def test_what_needs_grey_levels_does_not_follow_normalize(transform: Transform) -> None:
    name = type(transform).__name__
    with pytest.raises(ValueError, match=f"{name} stands after Normalize but works on uint8 images; move Normalize to"):
        Compose([Normalize(), RandomHorizontalFlip(), transform])


def test_label_map_stays_when_only_the_image_is_meant() -> None:
    before = coordinates()
    after = Compose([Resize([30, 20])], image_only=True)(before, rng())
    assert after.image.shape == (20, 30, 3)
    assert after.label is before.label


def test_chain_goes_to_workers() -> None:
    chain = pickle.loads(pickle.dumps(Compose([Resize([30, 20]), Normalize()])))  # noqa: S301
    assert chain(coordinates(), rng()).image.shape == (20, 30, 3)
