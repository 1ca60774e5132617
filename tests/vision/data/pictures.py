"""Small pictures for tests, in arrays and in files."""

from pathlib import Path

import numpy as np
from PIL import Image

from mezzo.vision.data import Sample


def blob(width: int = 90, height: int = 60, seed: int = 0) -> Sample:
    """Return a sample whose image is white exactly where its label is 1: who moves one must move the other."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    cx, cy = width * rng.uniform(0.3, 0.6), height * rng.uniform(0.3, 0.6)
    mask = ((x - cx) / (width * 0.3)) ** 2 + ((y - cy) / (height * 0.2)) ** 2 < 1
    return Sample(np.repeat(mask[..., None] * np.uint8(255), 3, 2), mask.astype(np.uint8), "blob.png")


def coordinates(width: int = 90, height: int = 60) -> Sample:
    """Return a sample that says where each pixel was: red is the column, green the row, as is the label."""
    y, x = np.mgrid[:height, :width].astype(np.uint8)
    return Sample(np.stack([x, y, x ^ y], 2), y.copy(), "coordinates.png")


def noise(width: int = 90, height: int = 60, seed: int = 0) -> np.ndarray:
    """Return an image of random grey levels."""
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def smooth(width: int = 90, height: int = 60) -> np.ndarray:
    """Return an image without sharp edges, so that all ways of resizing agree."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    return np.stack([120 + 100 * np.sin(3 * x), 120 + 100 * np.cos(4 * y), 200 * x * y], 2).astype(np.uint8)


def write(path: Path, pixels: np.ndarray, mode: str | None = None) -> Path:
    """Write pixels with Pillow; the ending says how."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)
    return path
