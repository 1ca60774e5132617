"""The rule by which the reference runs got weights, images and labels: numpy's frozen legacy generator, seeded by names."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

_SMALL_RESIDUALS = (".fuse_func.", ".conv2._batch_norm.", ".conv3._batch_norm.")
_SOFT_ATTENTION = (".attention_block.f_pixel.", ".attention_block.f_object.")
_CLASSIFIERS = ("head.aux_head.1.weight", "head.cls_head.weight", "head.cls.weight", "head.decoder.conv.weight")


def generator(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(name.encode()) & 0xFFFFFFFF)


def weight(key: str, shape: Sequence[int]) -> np.ndarray:
    """The float32 value of a state-dict key, in Paddle's layout (linear weights are [in, out])."""
    random, leaf = generator(key), key.rsplit(".", 1)[-1]
    if leaf == "_mean":
        value = 0.2 * random.standard_normal(shape)
    elif leaf == "_variance":
        value = 0.5 + random.random_sample(shape)
    elif leaf == "_scale":
        value = 0.8 + 0.4 * random.random_sample(shape)
    elif leaf == "bias":
        value = 0.2 * random.standard_normal(shape)
        value += 1.0 if key.startswith("depthwise_separable2.piontwise_conv.") else 0.0
    elif len(shape) == 1:
        value = 0.5 + random.random_sample(shape)
        value *= 0.15 if any(part in key for part in _SMALL_RESIDUALS) else 1.0
        value *= 0.6 if any(part in key for part in _SOFT_ATTENTION) else 1.0
    elif len(shape) == 4:
        value = random.standard_normal(shape) * np.sqrt((1.0 if shape[1] == 1 else 2.0) / np.prod(shape[1:]))
        value *= 0.15 if key in _CLASSIFIERS else 1.0
        value *= 5.0 if key.startswith("seg_heads.") and key.endswith(".conv_out.weight") else 1.0
    else:
        value = random.standard_normal(shape) * np.sqrt(1.0 / shape[0])
    return value.astype(np.float32)


def state(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    return {key: weight(key, tuple(shape)) for key, shape in shapes.items()}


def image(tag: str, shape: Sequence[int]) -> np.ndarray:
    return generator(f"image/{tag}").standard_normal(shape).astype(np.float32)


def label_map(tag: str, count: int, height: int, width: int, classes: int) -> np.ndarray:
    """Blocks of eight pixels with a class each; 8 % of the pixels are ignored (255)."""
    random = generator(f"labels/{tag}")
    blocks = random.randint(0, classes, size=(count, (height + 7) // 8, (width + 7) // 8))
    labels = blocks.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width]
    return np.where(random.random_sample((count, height, width)) < 0.08, 255, labels).astype(np.int64)


def class_labels(tag: str, count: int, classes: int) -> np.ndarray:
    return generator(f"labels/{tag}").randint(0, classes, size=(count,)).astype(np.int64)


def signs(key: str, shape: Sequence[int]) -> np.ndarray:
    """The vector of signs that a gradient or statistic is projected on."""
    return generator(f"probe/{key}").randint(0, 2, size=tuple(shape)).astype(np.float64) * 2 - 1
