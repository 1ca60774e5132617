"""What the lite sets share: seeds from names, textures, files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

Progress = Callable[[int, int], None]
Image = NDArray[np.uint8]
Mask = NDArray[np.bool_]

LARGEST_SIDE = 4096
LARGEST_COUNT = 100_000


def random_of(name: str) -> np.random.RandomState:
    """Return a generator that depends only on a name.

    RandomState gives the same numbers in all versions of numpy.
    """
    return np.random.RandomState(zlib.crc32(name.encode()))


def rgb_of_hue(hue: float, saturation: float, value: float) -> NDArray[np.float64]:
    """Return an RGB colour, 0 to 255; hue, saturation and value are 0 to 1."""
    ramp = np.abs((hue * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1
    pure: NDArray[np.float64] = np.clip(ramp, 0, 1)
    return 255 * value * (1 - saturation + saturation * pure)


def cloud(rng: np.random.RandomState, width: int, height: int, cells: int, strength: float) -> NDArray[np.float64]:
    """Return smooth noise around 0: values on a coarse grid, bilinear between them."""
    grid = rng.uniform(-strength, strength, size=(cells, cells))
    smooth: NDArray[np.float64] = cv2.resize(grid, (width, height), interpolation=cv2.INTER_LINEAR).astype(np.float64)
    return smooth


def to_image(values: NDArray[np.floating[Any]]) -> Image:
    """Return grey levels from numbers, rounded and cut to 0..255."""
    levels: Image = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return levels


def add_grain(rng: np.random.RandomState, image: Image, strength: int) -> Image:
    """Return an image with noise of integers, as a camera has it."""
    return to_image(image + rng.randint(-strength, strength + 1, size=image.shape).astype(float))


def write_image(path: Path, image: Image) -> None:
    """Write an RGB image or a label map; the ending says PNG or JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = image[..., ::-1] if image.ndim == 3 else image
    how = [cv2.IMWRITE_PNG_COMPRESSION, 1] if path.suffix == ".png" else [cv2.IMWRITE_JPEG_QUALITY, 92]
    encoded, data = cv2.imencode(path.suffix, np.ascontiguousarray(pixels), how)
    assert encoded, f"OpenCV does not encode {path.suffix}"
    path.write_bytes(data.tobytes())


def check_size(name: str, size: Any, least: int) -> tuple[int, int]:
    """Return a size of images as width and height."""
    allowed = isinstance(size, Sequence) and len(size) == 2
    if not allowed or not all(isinstance(side, int) and least <= side <= LARGEST_SIDE for side in size):
        raise ValueError(
            f"{name}: size={size!r} must be two integers, width and height, from {least} to {LARGEST_SIDE}"
        )
    return size[0], size[1]


def check_count(name: str, count: Any, meaning: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of images, one for each meaning."""
    allowed = isinstance(count, Sequence) and len(count) == len(meaning)
    if not allowed or not all(isinstance(number, int) and 1 <= number <= LARGEST_COUNT for number in count):
        wanted = f"{len(meaning)} integers ({', '.join(meaning)}) from 1 to {LARGEST_COUNT}"
        raise ValueError(f"{name}: count={count!r} must be {wanted}")
    return tuple(count)
