"""Arguments of transforms: PaddleSeg's defaults, and one line for what is wrong."""

import inspect
import re

import pytest

from mezzo.vision.data import AutoAugment, CenterCrop, RandomCrop, RandomErase, RandomResizedCrop, ResizeShort
from mezzo.vision.data import transforms as t

FAULTS = [
    (lambda: t.Resize(512), "Resize: target_size=512"),
    (lambda: t.Resize([512]), "Resize: target_size=[512]"),
    (lambda: t.Resize([512, 0]), "Resize: target_size=[512, 0]"),
    (lambda: t.Resize([512.0, 2]), "Resize: target_size=[512.0, 2]"),
    (lambda: t.Resize("ab"), "Resize: target_size='ab'"),
    (lambda: t.Resize(interp="LINEER"), "Resize: unknown interp 'LINEER'; did you mean 'LINEAR'"),
    (lambda: t.Resize(size_divisor=0), "Resize: size_divisor=0"),
    (lambda: t.Resize(size_divisor=2.5), "Resize: size_divisor=2.5"),
    (lambda: t.ResizeByLong(0), "ResizeByLong: long_size=0"),
    (lambda: t.ResizeByShort(1.5), "ResizeByShort: short_size=1.5"),
    (lambda: t.LimitLong(max_long="9"), "LimitLong: max_long='9'"),
    (lambda: t.LimitLong(max_long=5, min_long=9), "LimitLong: min_long=9"),
    (lambda: t.ResizeRangeScaling(9, 5), "ResizeRangeScaling: min_value=9"),
    (lambda: t.ResizeStepScaling(0, 1), "ResizeStepScaling: min_scale_factor=0"),
    (lambda: t.ResizeStepScaling(2, 1), "ResizeStepScaling: min_scale_factor=2"),
    (lambda: t.ResizeStepScaling(scale_step_size=-1), "ResizeStepScaling: scale_step_size=-1"),
    (lambda: t.RandomScaleAspect(1.5), "RandomScaleAspect: min_scale=1.5"),
    (lambda: t.RandomHorizontalFlip(-0.1), "RandomHorizontalFlip: prob=-0.1"),
    (lambda: t.RandomVerticalFlip(float("nan")), "RandomVerticalFlip: prob=nan"),
    (lambda: t.RandomVerticalFlip(True), "RandomVerticalFlip: prob=True"),
    (lambda: t.RandomRotation(-1), "RandomRotation: max_rotation=-1"),
    (lambda: t.RandomRotation(181), "RandomRotation: max_rotation=181"),
    (lambda: t.Padding([9, 9], [1, 2]), "Padding: im_padding_value=[1, 2]"),
    (lambda: t.Padding([9, 9], 256), "Padding: im_padding_value=256"),
    (lambda: t.RandomPaddingCrop([9, 9], 0, 256), "RandomPaddingCrop: label_padding_value=256"),
    (lambda: t.RandomPaddingCrop(category_max_ratio=0), "RandomPaddingCrop: category_max_ratio=0"),
    (lambda: t.RandomPaddingCrop(category_max_ratio=1.5), "RandomPaddingCrop: category_max_ratio=1.5"),
    (lambda: t.PaddingByAspectRatio(0), "PaddingByAspectRatio: aspect_ratio=0"),
    (lambda: t.RandomCenterCrop(0.5), "RandomCenterCrop: retain_ratio=0.5"),
    (lambda: t.RandomAffine(translation_offset=-1), "RandomAffine: translation_offset=-1"),
    (lambda: t.RandomDistort(hue_prob=2), "RandomDistort: hue_prob=2"),
    (lambda: t.RandomDistort(contrast_range=1.5), "RandomDistort: contrast_range=1.5"),
    (lambda: t.RandomBlur(blur_type="gauss"), "RandomBlur: unknown blur_type 'gauss'; did you mean 'gaussian'"),
    (lambda: t.RandomNoise(max_sigma=-1), "RandomNoise: max_sigma=-1"),
    (lambda: t.Normalize([0.5, 0.5]), "Normalize: mean=[0.5, 0.5]"),
    (lambda: t.Normalize(std=[0.5, 0.5, 0]), "Normalize: std=(0.5, 0.5, 0.0)"),
    (lambda: t.Normalize("abc"), "Normalize: mean='abc'"),
    (lambda: RandomResizedCrop(0), "RandomResizedCrop: size=0"),
    (lambda: RandomResizedCrop(9, scale=(1, 0.1)), "RandomResizedCrop: scale=(1, 0.1)"),
    (lambda: RandomResizedCrop(9, scale=(0.1, 2)), "RandomResizedCrop: scale=(0.1, 2)"),
    (lambda: RandomResizedCrop(9, ratio=(0, 2)), "RandomResizedCrop: ratio=(0, 2)"),
    (lambda: ResizeShort(-4), "ResizeShort: size=-4"),
    (lambda: CenterCrop(1.0), "CenterCrop: size=1.0"),
    (lambda: RandomCrop(9, padding=-1), "RandomCrop: padding=-1"),
    (lambda: RandomErase(1.1), "RandomErase: probability=1.1"),
    (lambda: RandomErase(scale=(0.1, 1.1)), "RandomErase: scale=(0.1, 1.1)"),
    (lambda: RandomErase(fill="black"), "RandomErase: unknown fill 'black'"),
    (lambda: AutoAugment("imagnet"), "AutoAugment: unknown policy 'imagnet'; did you mean 'imagenet'"),
    (lambda: AutoAugment("ra", num_ops=0), "AutoAugment: num_ops=0"),
    (lambda: AutoAugment("ra", magnitude=31), "AutoAugment: magnitude=31"),
]


@pytest.mark.parametrize(("make", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_wrong_argument_is_one_line_with_transform_and_value(make, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("Resize", {"target_size": (512, 512), "interp": "LINEAR", "keep_ratio": False, "size_divisor": None}),
        ("LimitLong", {"max_long": None, "min_long": None}),
        ("ResizeRangeScaling", {"min_value": 400, "max_value": 600}),
        ("ResizeStepScaling", {"min_scale_factor": 0.75, "max_scale_factor": 1.25, "scale_step_size": 0.25}),
        ("RandomPaddingCrop", {"crop_size": (512, 512), "im_padding_value": 127.5, "label_padding_value": 255}),
        ("PaddingByAspectRatio", {"aspect_ratio": 1}),
        ("RandomCenterCrop", {"retain_ratio": (0.5, 0.5)}),
        ("RandomScaleAspect", {"min_scale": 0.5, "aspect_ratio": 0.33}),
        ("RandomRotation", {"max_rotation": 15, "im_padding_value": 127.5, "label_padding_value": 255}),
        ("RandomBlur", {"prob": 0.1, "blur_type": "gaussian"}),
        ("RandomNoise", {"prob": 0.5, "max_sigma": 10.0}),
        ("RandomAffine", {"size": (224, 224), "max_rotation": 15, "min_scale_factor": 0.75, "max_scale_factor": 1.25}),
        ("RandomDistort", {"brightness_range": 0.5, "hue_range": 18, "hue_prob": 0.5, "sharpness_prob": 0}),
    ],
)
def test_defaults_are_those_of_paddleseg(name: str, defaults: dict) -> None:
    parameters = inspect.signature(t.TRANSFORMS[name]).parameters
    assert {key: parameters[key].default for key in defaults} == defaults


def test_a_number_that_no_float_holds_is_refused_in_one_line() -> None:
    for value in (10**400, 10**5000):
        with pytest.raises(ValueError, match="Normalize: std="):
            t.Normalize(std=value)
