"""mini_supervisely: people, drawn as head, body and limbs, before rooms and landscapes; two classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

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

SMALLEST, LARGEST = 200, 400
SPLITS = ("train", "val", "test")

Point = tuple[float, float]
Part = tuple[Mask, NDArray[np.float64]]
"""Where a part of a person lies, and its colour."""


def make_mini_supervisely(
    root: Path, progress: Progress, *, count: Sequence[int] = (120, 50, 50), size: Sequence[int] | None = None
) -> None:
    """Write `Images/*.png`, `Annotations/*.png` (0 background, 1 person) and train.txt, val.txt, test.txt.

    Args:
        root: An empty folder.
        progress: Called with pairs done and pairs in all.
        count: Pairs for training, evaluation and test.
        size: Width and height; without it each image has its own, sides of 200 to 400.
    """
    numbers = check_count("mini_supervisely", count, SPLITS)
    fixed = None if size is None else check_size("mini_supervisely", size, 32)
    done = 0
    for split, number in zip(SPLITS, numbers, strict=True):
        names = [f"{split}_{i:04d}.png" for i in range(number)]
        for name in names:
            image, label = draw_person(name, fixed)
            write_image(root / "Images" / name, image)
            write_image(root / "Annotations" / name, label)
            done += 1
            progress(done, sum(numbers))
        lines = "".join(f"Images/{name} Annotations/{name}\n" for name in names)
        (root / f"{split}.txt").write_text(lines, encoding="utf-8")


def draw_person(name: str, size: tuple[int, int] | None = None) -> tuple[Image, Image]:
    """Return an image and its label; both follow from the name."""
    rng = random_of(name)
    width, height = size or (int(rng.randint(SMALLEST, LARGEST + 1)), int(rng.randint(SMALLEST, LARGEST + 1)))
    image = _background(rng, width, height)
    label = np.zeros((height, width), np.uint8)
    folds = cloud(rng, width, height, 12, 30)[..., None]
    for part, colour in _Person(rng, width, height).parts():
        image[part] = colour + folds[part]
        label[part] = 1
    return add_grain(rng, to_image(image), 6), label


def _background(rng: np.random.RandomState, width: int, height: int) -> NDArray[np.float64]:
    """Return a wall or sky over a floor, with a few boxes; colours that no skin has."""
    horizon = int(height * rng.uniform(0.4, 0.8))
    image = np.empty((height, width, 3))
    image[:horizon] = rgb_of_hue(rng.uniform(0.35, 0.75), rng.uniform(0.1, 0.6), rng.uniform(0.5, 1))
    image[horizon:] = rgb_of_hue(rng.uniform(0.2, 0.45), rng.uniform(0.1, 0.5), rng.uniform(0.2, 0.6))
    for _ in range(rng.randint(6)):
        left, top = rng.randint(width), rng.randint(height)
        box = slice(top, top + rng.randint(8, height // 2)), slice(left, left + rng.randint(8, width // 3))
        image[box] = rgb_of_hue(rng.uniform(0.3, 0.8), rng.uniform(0, 0.6), rng.uniform(0.3, 0.9))
    return image + cloud(rng, width, height, 6, 30)[..., None]


class _Person:
    """Where a person stands, how large, and in which colours; lengths are in units of half a head."""

    def __init__(self, rng: np.random.RandomState, width: int, height: int) -> None:
        self.rng, self.width, self.height = rng, width, height
        self.unit = height * rng.uniform(0.075, 0.11)
        self.x = width * rng.uniform(0.35, 0.65)
        self.y = height * rng.uniform(0.12, 0.25) + self.unit * 0.5
        self.skin = rgb_of_hue(rng.uniform(0.04, 0.09), rng.uniform(0.35, 0.6), rng.uniform(0.5, 0.95))
        self.shirt = rgb_of_hue(rng.choice([0.0, 0.05, 0.9, 0.95]), rng.uniform(0.6, 1), rng.uniform(0.5, 0.95))
        self.trousers = rgb_of_hue(rng.uniform(0.75, 0.95), rng.uniform(0.3, 0.8), rng.uniform(0.15, 0.45))
        self.hair = rgb_of_hue(rng.uniform(0.02, 0.1), rng.uniform(0.2, 0.7), rng.uniform(0.05, 0.4))

    def parts(self) -> list[Part]:
        """Return the parts, the front ones last; 0, 0 is the middle of the head."""
        neck, hips = 1.3, 4.6
        trunk = self._polygon([(-1.25, neck), (1.25, neck), (1, hips + 0.3), (-1, hips + 0.3)])
        throat = self._line([(0, 0), (0, neck)], 0.7)
        body = [(trunk, self.shirt), (throat, self.skin)]
        head = [(self._ellipse(0, 0.78, 1), self.skin), (self._ellipse(-0.45, 0.8, 0.65), self.hair)]
        return [*self._limbs(-1, neck, hips), *self._limbs(1, neck, hips), *body, *head]

    def _limbs(self, side: int, neck: float, hips: float) -> list[Part]:
        """Return a leg and an arm; `side` is -1 or 1."""
        draw = self.rng.uniform
        hip, shoulder = (side * 0.55, hips), (side * 1.15, neck + 0.4)
        foot = (hip[0] + side * draw(0, 0.9), hips + 4.5)
        elbow = (shoulder[0] + side * draw(0.2, 1.2), shoulder[1] + draw(0.6, 1.7))
        hand = (elbow[0] + side * draw(-1, 0.8), elbow[1] + draw(-1.5, 1.5))
        return [
            (self._line([hip, foot], 0.9), self.trousers),
            (self._line([elbow, hand], 0.5), self.skin),
            (self._line([shoulder, elbow], 0.6), self.shirt),
        ]

    def _line(self, points: Sequence[Point], thickness: float) -> Mask:
        mask = np.zeros((self.height, self.width), np.uint8)
        cv2.polylines(mask, [self._pixels(points)], False, 1, max(1, round(thickness * self.unit)))
        return mask.astype(bool)

    def _polygon(self, points: Sequence[Point]) -> Mask:
        mask = np.zeros((self.height, self.width), np.uint8)
        cv2.fillPoly(mask, [self._pixels(points)], 1)
        return mask.astype(bool)

    def _ellipse(self, below: float, across: float, down: float) -> Mask:
        mask = np.zeros((self.height, self.width), np.uint8)
        axes = (max(1, round(across * self.unit)), max(1, round(down * self.unit)))
        cv2.ellipse(mask, (round(self.x), round(self.y + below * self.unit)), axes, 0, 0, 360, 1, -1)
        return mask.astype(bool)

    def _pixels(self, points: Sequence[Point]) -> NDArray[np.int32]:
        corners: NDArray[np.int32] = np.rint(np.array(points) * self.unit + (self.x, self.y)).astype(np.int32)
        return corners
