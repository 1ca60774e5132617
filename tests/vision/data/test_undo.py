"""Chains for evaluation: what happened to the size of an image is noted, what cannot be undone is refused."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import coordinates, noise

from mezzo.vision.data import TRANSFORMS, CenterCrop, Compose, Normalize, Sample, Transform
from mezzo.vision.data.transforms import (
    LimitLong,
    Padding,
    PaddingByAspectRatio,
    RandomBlur,
    RandomDistort,
    RandomNoise,
    Resize,
    ResizeByLong,
    ResizeByShort,
)

FINE = {"RandomDistort", "RandomBlur", "RandomNoise", "Normalize"}
RESIZE = {"Resize", "ResizeByLong", "ResizeByShort", "LimitLong"}
PAD = {"Padding", "PaddingByAspectRatio"}
NEEDED = {
    "ResizeByLong": {"long_size": 50},
    "ResizeByShort": {"short_size": 50},
    "Padding": {"target_size": [120, 110]},
}


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def evaluated(*transforms: Transform, sample: Sample | None = None) -> Sample:
    return Compose(transforms, image_only=True)(sample or coordinates(), rng())


@pytest.mark.parametrize(
    ("transforms", "undo"),
    [
        ([], ()),
        ([Normalize()], ()),
        ([RandomDistort(), RandomBlur(), RandomNoise()], ()),
        ([Resize([30, 20])], (("resize", 60, 90),)),
        ([Resize([90, 60])], ()),
        ([ResizeByLong(45)], (("resize", 60, 90),)),
        ([ResizeByShort(120)], (("resize", 60, 90),)),
        ([LimitLong(max_long=45)], (("resize", 60, 90),)),
        ([LimitLong(max_long=100)], ()),
        ([Padding([100, 100])], (("pad", 60, 90),)),
        ([PaddingByAspectRatio(1)], (("pad", 60, 90),)),
        ([PaddingByAspectRatio(1.5)], ()),
        (
            [ResizeByLong(45), Padding([64, 64]), Normalize(), Resize([32, 32])],
            (("resize", 60, 90), ("pad", 30, 45), ("resize", 64, 64)),
        ),
    ],
)
def test_every_change_of_size_is_noted_with_the_size_before_it(transforms: list, undo: tuple) -> None:
    assert evaluated(*transforms).undo == undo


@pytest.mark.parametrize("label", [None, 3, "map"])
def test_label_stays_and_undo_is_noted_whatever_it_is(label: object) -> None:
    before = coordinates() if label == "map" else replace(coordinates(), label=label)
    after = evaluated(Resize([30, 20]), sample=before)
    assert after.label is before.label
    assert (after.undo, before.undo) == ((("resize", 60, 90),), ())


def test_nothing_is_noted_in_training() -> None:
    assert Compose([Resize([30, 20])])(coordinates(), rng()).undo == ()


@pytest.mark.parametrize("transform", [Padding([100, 70]), PaddingByAspectRatio(1), PaddingByAspectRatio(2)])
def test_what_was_padded_is_cut_off_at_the_right_and_the_bottom(transform: Transform) -> None:
    before = coordinates()
    after = evaluated(transform)
    ((kind, height, width),) = after.undo
    assert kind == "pad"
    assert (after.image[:height, :width] == before.image).all()


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=2)
STEPS = st.one_of(
    SIZES.map(lambda size: Resize(size)),
    st.integers(1, 40).map(ResizeByLong),
    st.integers(1, 20).map(lambda limit: LimitLong(max_long=limit)),
    st.sampled_from([0.5, 1, 2]).map(PaddingByAspectRatio),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=4), SIZES)
def test_undoing_from_the_last_to_the_first_gives_the_size_of_the_file(steps: list, size: list[int]) -> None:
    before = Sample(noise(*size), None, "x.png")
    after = evaluated(*steps, sample=before)
    image = after.image
    for kind, height, width in reversed(after.undo):
        if kind == "pad":
            assert image.shape[0] >= height
            assert image.shape[1] >= width
            image = image[:height, :width]
        else:
            image = Resize([width, height])(Sample(image.copy(), None, ""), rng()).image
    assert image.shape == before.image.shape


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_is_noted_or_refused_in_evaluation(name: str) -> None:
    transform = TRANSFORMS[name](**NEEDED.get(name, {}))
    if name in FINE | RESIZE | PAD:
        kinds = {kind for kind, _, _ in evaluated(transform).undo}
        assert kinds <= ({"resize"} if name in RESIZE else {"pad"} if name in PAD else set())
        return
    message = f"val_dataset: {name} changes an image in a way that evaluation cannot undo; leave it out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Compose([Resize([30, 20]), transform, Normalize()], image_only=True)
    assert Compose([transform]).on_host == (transform,), "training may use it"


@dataclass
class Halved:
    """A transform of somebody else."""

    undone_by: str | None = None

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        return replace(sample, image=sample.image[::2, ::2])


@pytest.mark.parametrize("transform", [CenterCrop(20), Halved(), Halved("flip")])
def test_change_of_size_that_nobody_can_undo_is_an_error(transform: Transform) -> None:
    name = type(transform).__name__
    kind = getattr(transform, "undone_by", None)
    message = (
        f"coordinates.png: {name} changed the size of the image, and its attribute undone_by={kind!r} does not say "
        "how evaluation undoes that; must be 'resize' or 'pad'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        evaluated(transform)


def test_transform_of_somebody_else_can_say_how_it_is_undone() -> None:
    assert evaluated(Halved("resize")).undo == (("resize", 60, 90),)
