"""imagenet_lite: sixteen classes, a shape in a colour with a texture each, in ImageNet's folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from mezzo.vision.lite._draw import (
    Image,
    Mask,
    Progress,
    add_grain,
    check_count,
    check_size,
    cloud,
    random_of,
    rgb_of_hue,
    to_image,
    write_image,
)

SHAPES = ("disc", "square", "triangle", "cross")
COLOURS = {"red": 0.0, "yellow": 0.16, "green": 0.36, "blue": 0.62}
CLASSES = tuple(
    f"n{s:02d}{c:02d}_{colour}_{shape}" for s, shape in enumerate(SHAPES) for c, colour in enumerate(COLOURS)
)

SMALLEST, LARGEST = 96, 160


def make_imagenet_lite(
    root: Path, progress: Progress, *, count: Sequence[int] = (40, 10), size: Sequence[int] | None = None
) -> None:
    """Write `train/CLASS/*.JPEG`, `val/CLASS/*.JPEG` and `test/demo.jpg`.

    Args:
        root: An empty folder.
        progress: Called with files done and files in all.
        count: Images a class for training and for evaluation.
        size: Width and height; without it each image has its own, sides of 96 to 160.
    """
    numbers = check_count("imagenet_lite", count, ("train", "val"))
    fixed = None if size is None else check_size("imagenet_lite", size, 16)
    files = [
        (f"{split}/{name}/{name}_{i}.JPEG", index)
        for split, number in zip(("train", "val"), numbers, strict=True)
        for index, name in enumerate(CLASSES)
        for i in range(number)
    ]
    files.append(("test/demo.jpg", 0))
    for done, (file, index) in enumerate(files, start=1):
        write_image(root / file, draw_shape(index, file, fixed))
        progress(done, len(files))


def draw_shape(index: int, name: str, size: tuple[int, int] | None = None) -> Image:
    """Return an image of a class; everything but the class follows from the name."""
    rng = random_of(name)
    width, height = size or (int(rng.randint(SMALLEST, LARGEST + 1)), int(rng.randint(SMALLEST, LARGEST + 1)))
    shape, colour = divmod(index, len(COLOURS))
    back = rgb_of_hue(rng.uniform(), rng.uniform(0, 0.3), rng.uniform(0.25, 0.9))
    image = back + cloud(rng, width, height, 5, 40)[..., None]
    hue = list(COLOURS.values())[colour] + rng.uniform(-0.03, 0.03)
    front = rgb_of_hue(hue, rng.uniform(0.7, 1), rng.uniform(0.6, 1))
    shade = 1 - 0.35 * _texture(rng, (shape + colour) % 4, width, height)
    mask = _mask(rng, SHAPES[shape], width, height)
    image[mask] = (front * shade[..., None])[mask]
    return add_grain(rng, to_image(image), 8)


def _mask(rng: np.random.RandomState, shape: str, width: int, height: int) -> Mask:
    """Return where a shape lies: turned, moved and sized a little differently each time."""
    radius = min(width, height) * rng.uniform(0.28, 0.45)
    centre = np.array([width, height]) * rng.uniform(0.42, 0.58, size=2)
    mask = np.zeros((height, width), np.uint8)
    if shape == "disc":
        axes = (int(radius), int(radius * rng.uniform(0.85, 1)))
        cv2.ellipse(mask, (int(centre[0]), int(centre[1])), axes, 0, 0, 360, 1, -1)
    else:
        turn = rng.uniform(-0.25, 0.25)
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        points = centre + radius * OUTLINES[shape] @ rotation.T
        cv2.fillPoly(mask, [np.rint(points).astype(np.int32)], 1)
    return mask.astype(bool)


def _texture(rng: np.random.RandomState, kind: int, width: int, height: int) -> Any:
    """Return a pattern of 0 and 1: plain, stripes across, stripes down, squares."""
    period = rng.randint(6, 10)
    row = ((np.arange(height) + rng.randint(period)) // (period // 2) % 2)[:, None]
    column = ((np.arange(width) + rng.randint(period)) // (period // 2) % 2)[None, :]
    zero = np.zeros((height, width))
    return (zero, zero + row, zero + column, zero + (row ^ column))[kind]


_ARM = 0.36
_QUARTERS = (((-1, -1), -1), ((1, -1), 1), ((1, 1), -1), ((-1, 1), 1))
OUTLINES = {
    "square": np.array([(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]),
    "triangle": np.array([(0, -1), (0.95, 0.75), (-0.95, 0.75)]),
    "cross": np.array(
        [(x * a, y * b) for (x, y), flip in _QUARTERS for a, b in ((_ARM, 1), (_ARM, _ARM), (1, _ARM))[::flip]]
    ),
}
"""Corners of the shapes, inside a circle of radius about 1."""
