"""cityscapes: streets with all nineteen classes, in the tree of Cityscapes, with its train ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from mezzo.vision.data import IGNORE
from mezzo.vision.lite._draw import (
    Image,
    Progress,
    add_grain,
    check_count,
    check_size,
    cloud,
    random_of,
    to_image,
    write_image,
)

CLASSES = (
    "road sidewalk building wall fence pole traffic_light traffic_sign vegetation terrain sky person rider car truck "
    "bus train motorcycle bicycle"
).split()
ID = {name: index for index, name in enumerate(CLASSES)}

COLOURS = np.array(
    [
        (95, 95, 100),
        (160, 145, 150),
        (140, 105, 85),
        (125, 120, 140),
        (190, 165, 140),
        (70, 70, 70),
        (235, 190, 60),
        (225, 225, 60),
        (70, 120, 45),
        (150, 190, 105),
        (150, 190, 235),
        (210, 55, 75),
        (235, 95, 35),
        (30, 45, 150),
        (35, 85, 125),
        (25, 135, 150),
        (70, 30, 120),
        (45, 30, 75),
        (120, 35, 50),
    ],
    dtype=float,
)
"""The usual colour of each class; each object has its own shade of it."""

VAL_IDS = tuple(f"frankfurt_000000_{n}" for n in ("000294", "000576", "001016", "001236", "001751"))
"""The five images that the list for inference names."""

TRAIN_CITIES = ("aachen", "bochum")


def make_cityscapes(
    root: Path, progress: Progress, *, count: Sequence[int] = (16,), size: Sequence[int] = (512, 256)
) -> None:
    """Write `leftImg8bit` and `gtFine` for train and val, and list files.

    Args:
        root: An empty folder.
        progress: Called with pairs done and pairs in all.
        count: Pairs for training; those for evaluation are the five that `cityscapes_val_5.list` names.
        size: Width and height; the real ones are (2048, 1024).
    """
    (number,) = check_count("cityscapes", count, ("train",))
    width, height = check_size("cityscapes", size, 64)
    train = [f"{TRAIN_CITIES[i % len(TRAIN_CITIES)]}_{i:06d}_000019" for i in range(number)]
    todo = [("train", name) for name in sorted(train)] + [("val", name) for name in VAL_IDS]
    lines: dict[str, list[str]] = {"train": [], "val": []}
    for done, (split, name) in enumerate(todo, start=1):
        files = [
            f"leftImg8bit/{split}/{name.partition('_')[0]}/{name}_leftImg8bit.png",
            f"gtFine/{split}/{name.partition('_')[0]}/{name}_gtFine_labelTrainIds.png",
        ]
        for file, pixels in zip(files, draw_street(name, width, height), strict=True):
            write_image(root / file, pixels)
        lines[split].append(" ".join(files) + "\n")
        progress(done, len(todo))
    for file, split in (("train.list", "train"), ("val.list", "val"), ("cityscapes_val_5.list", "val")):
        (root / file).write_text("".join(lines[split]), encoding="utf-8")


def draw_street(name: str, width: int, height: int) -> tuple[Image, Image]:
    """Return an image and its train ids; both follow from the name and the size."""
    rng = random_of(name)
    street = _Street(rng, width, height)
    street.ground()
    street.houses()
    street.furniture()
    street.traffic()
    return street.finish()


class _Street:
    """A picture in the making; coordinates are parts of the width and the height."""

    def __init__(self, rng: np.random.RandomState, width: int, height: int) -> None:
        self.rng, self.width, self.height = rng, width, height
        self.label: Image = np.full((height, width), ID["sky"], np.uint8)
        self.shade: NDArray[np.float64] = np.zeros((height, width))
        self.horizon = rng.uniform(0.42, 0.5)

    def fill(self, kind: str, points: Sequence[tuple[float, float]]) -> None:
        """Paint a polygon with a class, in a shade of its own."""
        scaled = np.rint(np.array(points) * (self.width, self.height)).astype(np.int32)
        mask = np.zeros((self.height, self.width), np.uint8)
        cv2.fillPoly(mask, [scaled], 1)
        self.label[mask > 0] = ID[kind] if kind else IGNORE
        self.shade[mask > 0] = self.rng.uniform(-14, 14)

    def box(self, kind: str, left: float, top: float, width: float, height: float) -> None:
        """Paint a rectangle."""
        right, bottom = left + width, top + height
        self.fill(kind, [(left, top), (right, top), (right, bottom), (left, bottom)])

    def ground(self) -> None:
        """Paint terrain, the two sidewalks and the road, which all run to one point."""
        vanish = self.rng.uniform(0.4, 0.6), self.horizon
        self.box("terrain", 0, self.horizon, 1, 1 - self.horizon)
        self.fill("sidewalk", [vanish, (-0.45, 1), (1.45, 1)])
        self.fill("road", [vanish, (-0.05, 1), (1.05, 1)])

    def houses(self) -> None:
        """Paint buildings and trees left and right, with a wall and a fence before them."""
        for start, step in ((0.0, 1), (1.0, -1)):
            x = start
            while abs(x - start) < 0.4:
                wide = self.rng.uniform(0.08, 0.16)
                top = self.horizon * self.rng.uniform(0.05, 0.6) + abs(x - start) * 0.3
                kind = "building" if self.rng.uniform() < 0.75 else "vegetation"
                self.box(kind, min(x, x + step * wide), top, wide, self.horizon + 0.04 - top)
                x += step * wide
            kind = "wall" if self.rng.uniform() < 0.5 else "fence"
            self.box(kind, start if step > 0 else 0.78, self.horizon - 0.03, 0.22, 0.11)

    def furniture(self) -> None:
        """Paint poles with lights or signs."""
        for _ in range(4):
            x, top = self.rng.uniform(0.03, 0.97), self.rng.uniform(0.1, 0.25)
            self.box("pole", x, top, 0.01, self.horizon + 0.14 - top)
            kind = "traffic_light" if self.rng.uniform() < 0.5 else "traffic_sign"
            wide = 0.02 if kind == "traffic_light" else 0.04
            self.box(kind, x - wide / 2 + 0.005, top, wide, 0.08)

    def traffic(self) -> None:
        """Paint vehicles and people, near ones last, and the bonnet of the own car, which is ignored."""
        kinds = ["car", "car", "person", *self.rng.choice(list(VEHICLES), size=6)]
        near = np.sort(self.rng.uniform(0.15, 0.8, size=len(kinds)))
        for kind, scale in zip(kinds, near, strict=True):
            on_road = kind not in ("person", "bicycle")
            x = self.rng.uniform(0.25, 0.65) if on_road else self.rng.choice([0.12, 0.8]) + self.rng.uniform(-0.1, 0.08)
            self.vehicle(str(kind), x, self.horizon + 0.1 + 0.35 * scale, scale)
        self.fill("", [(0.2, 1), (0.3, 0.93), (0.7, 0.93), (0.8, 1)])

    def vehicle(self, kind: str, x: float, bottom: float, scale: float) -> None:
        """Paint one vehicle or person that stands on a line."""
        wide, high = (part * scale for part in VEHICLES[kind])
        self.box(kind, x, bottom - high, wide, high)
        if kind == "car":
            roof = ((0.15, 1), (0.3, 1.5), (0.7, 1.5), (0.85, 1))
            self.fill(kind, [(x + wide * across, bottom - high * up) for across, up in roof])
        elif kind in ("person", "rider"):
            self.box(kind, x + wide * 0.25, bottom - high * 1.25, wide * 0.5, high * 0.25)
        if kind == "rider":
            self.vehicle(
                "bicycle" if self.rng.uniform() < 0.5 else "motorcycle", x - wide / 2, bottom + high * 0.3, scale
            )

    def finish(self) -> tuple[Image, Image]:
        """Return the painted image and the labels."""
        colours = np.vstack([COLOURS, np.zeros((IGNORE + 1 - len(COLOURS), 3))])
        soft = self.shade + cloud(self.rng, self.width, self.height, 24, 12)
        return add_grain(self.rng, to_image(colours[self.label] + soft[..., None]), 5), self.label


VEHICLES = {
    "person": (0.05, 0.28),
    "rider": (0.05, 0.25),
    "car": (0.2, 0.16),
    "truck": (0.24, 0.34),
    "bus": (0.28, 0.32),
    "train": (0.34, 0.28),
    "motorcycle": (0.1, 0.12),
    "bicycle": (0.11, 0.13),
}
"""Width and height of what moves, at scale 1."""
