"""Input images of a file, a folder or a list, decoded and normalised batch by batch.

N batch, H height, W width.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mezzo._arguments import check_at_least
from mezzo.errors import RunError, unknown_choice
from mezzo.export import Deployed, DeployError
from mezzo.files import check_regular, is_regular, shown_path
from mezzo.vision.data import IMAGE_SUFFIXES as SUFFIXES
from mezzo.vision.data import (
    TRANSFORMS,
    CenterCrop,
    Compose,
    DataError,
    Normalize,
    ResizeShort,
    Sample,
    check_listed,
    listed_path,
    read_image,
    read_list_file,
)

LISTS = frozenset({".txt", ".list"})
"""Suffixes of files that name one image per line, in lower case."""

UndoSizes = tuple[tuple[str, int, int], ...]
"""See `Sample.undo`."""

_TRANSFORMS = {**TRANSFORMS, "ResizeShort": ResizeShort, "CenterCrop": CenterCrop}
_SEPARATOR = re.compile(r"[\s,]+")


@dataclass(slots=True)
class InputBatch:
    """Images of one size, ready for the network, with their originals."""

    images: NDArray[np.float32]
    """(N, 3, H, W), contiguous."""
    paths: list[Path]
    originals: list[NDArray[np.uint8]]
    """As in the files: RGB, each of its own size."""
    undo: list[UndoSizes]
    """How each image was resized; `to_labels` undoes it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An image that cannot be used; the others are still processed."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def find_images(source: Path) -> list[Path]:
    """Return the image files of a path.

    Args:
        source: One image; a folder, for all images below it in sorted order, without names that begin with a dot and
            without folders that are only linked; or a list (.txt, .list). A line of a list begins with a path, relative
            to the list's folder or absolute; columns after a blank or a comma are not looked at.

    Raises:
        DataError: There is no such path, no image in it, or a line names a file that is not there; or one of them is a
            pipe, a socket or a device.
    """
    if os.path.isdir(source):
        return _images_below(source)
    if not os.path.exists(source):
        raise DataError(f"{shown_path(source)}: no such file or folder")
    check_regular(source, raising=DataError)
    return _listed_images(source) if source.suffix.lower() in LISTS else [source]


def compose_transforms(model: Deployed) -> Compose:
    """Return the transforms of an exported model, ready to be applied.

    Raises:
        DeployError: One of them is unknown or has wrong arguments.
    """
    transforms = []
    for item in model.transforms:
        arguments = dict(item)
        name = arguments.pop("type", None)
        if not isinstance(name, str) or name not in _TRANSFORMS:
            raise DeployError(f"{model.path}: {unknown_choice('transform', name, _TRANSFORMS)}")
        try:
            transforms.append(_TRANSFORMS[name](**arguments))
        except (TypeError, ValueError) as error:
            raise DeployError(f"{model.path}: transform {name}: {error}") from error
    try:
        return Compose(transforms, image_only=model.task == "segmentation")
    except ValueError as error:
        raise DeployError(f"{model.path}: {error}") from error


def read_batches(paths: Sequence[Path], model: Deployed) -> Iterator[NDArray[np.float32]]:
    """Yield images as an exported model takes them, one per batch, or as many as its batch has.

    Raises:
        RunError: An image cannot be read, or has not the size that the model was exported for.
    """
    wanted = model.input_shape
    for batch in read_inputs(paths, compose_transforms(model), max(wanted[0], 1)):
        if isinstance(batch, Refused):
            raise RunError(f"{batch}; verification and calibration need images that can be read")
        if wanted[0] > 0 and len(batch.images) != wanted[0]:
            continue  # an incomplete last batch of a fixed size
        for size, free in zip(batch.images.shape[2:], wanted[2:], strict=True):
            if free not in (-1, size):
                raise RunError(
                    f"{batch.paths[0]}: is {batch.images.shape[2:]} after its transforms, but the model is exported for "
                    f"{wanted[2:]}; leave height and width free (-1)"
                )
        yield batch.images


def read_inputs(paths: Iterable[Path], transforms: Compose, batch_size: int) -> Iterator[InputBatch | Refused]:
    """Yield the images in order; each is decoded when it is needed.

    Args:
        paths: Image files.
        transforms: What the network was evaluated with. Its last Normalize is applied too, as on a device in training.
        batch_size: Most images of a batch. One ends early before an image of another size, and before a refused one.

    Raises:
        ValueError: The size of a batch is less than 1.
    """
    check_at_least("batch_size", batch_size)
    return _batches(paths, transforms, batch_size)


def to_planes(images: Sequence[NDArray[Any]], normalize: Normalize | None) -> NDArray[np.float32]:
    """Return images of one size, each (H, W, 3), as (N, 3, H, W); the numbers are those of `mezzo.vision.data.ToInput`.

    Args:
        images: Grey levels (uint8); floats, which are normalised already, only change their layout.
        normalize: Mean and standard deviation; None leaves values at 0..255.
    """
    height, width = images[0].shape[:2]
    planes = np.empty((len(images), 3, height, width), np.float32)
    tables = _tables(normalize)
    for image, target in zip(images, planes, strict=True):
        for channel, table, plane in zip(cv2.split(image), tables, target, strict=True):
            if image.dtype == np.uint8:
                cv2.LUT(channel, table, dst=plane)  # a table of 256 results: twice as fast as NumPy's arithmetic
            else:
                plane[...] = channel
    return planes


def _tables(normalize: Normalize | None) -> NDArray[np.float32]:
    """Return the normalised value of each grey level, (3, 256)."""
    mean, std = (normalize.mean, normalize.std) if normalize is not None else ((0.0,) * 3, (1 / 255,) * 3)
    levels = np.arange(256) / 255
    tables: NDArray[np.float64] = (levels - np.array(mean)[:, None]) / np.array(std)[:, None]
    return tables.astype(np.float32)


def _batches(paths: Iterable[Path], transforms: Compose, batch_size: int) -> Iterator[InputBatch | Refused]:
    rng = np.random.default_rng(0)  # transforms take one; those of an evaluation do not use it
    waiting: list[tuple[NDArray[np.uint8], Sample]] = []
    for path in paths:
        read = _read(path, transforms, rng)
        ends = isinstance(read, Refused) or (waiting and read[1].image.shape != waiting[0][1].image.shape)
        if waiting and ends:
            yield _stack(waiting, transforms.normalize)
            waiting = []
        if isinstance(read, Refused):
            yield read
            continue
        waiting.append(read)
        if len(waiting) == batch_size:
            yield _stack(waiting, transforms.normalize)
            waiting = []
    if waiting:
        yield _stack(waiting, transforms.normalize)


def _read(path: Path, transforms: Compose, rng: np.random.Generator) -> tuple[NDArray[np.uint8], Sample] | Refused:
    """Return an image as it is in the file, and transformed."""
    try:
        original = read_image(path)
        return original, transforms(Sample(original, None, str(path)), rng)
    except DataError as error:
        return Refused(path, str(error).removeprefix(f"{path}: "))
    except (cv2.error, MemoryError) as error:  # OpenCV cannot allocate the sizes of a deploy.yaml
        return Refused(path, f"the transforms fail: {' '.join(str(error).split())[:200]}")


def _stack(waiting: Sequence[tuple[NDArray[np.uint8], Sample]], normalize: Normalize | None) -> InputBatch:
    originals, samples = zip(*waiting, strict=True)
    images = to_planes([sample.image for sample in samples], normalize)
    return InputBatch(images, [Path(s.path) for s in samples], list(originals), [s.undo for s in samples])


def _images_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_cannot_read):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if _is_image(name)]
    if not found:
        raise DataError(f"{folder}: no image in the folder or below; known are {', '.join(sorted(SUFFIXES))}")
    return sorted(found)


def _cannot_read(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror})") from error


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def _listed_images(path: Path) -> list[Path]:
    found = [_listed_image(str(path.parent), line, where) for where, line in read_list_file(path)]
    if not found:
        raise DataError(f"{path}: the list is empty")
    return found


def _listed_image(root: str, line: str, where: str) -> Path:
    """Return the file of the first column, or of several columns together: a path may contain spaces."""
    ends = [*(gap.start() for gap in _SEPARATOR.finditer(line)), len(line)]
    files = [listed_path(root, line[:end], where) for end in ends]
    there = next((name for name in files if is_regular(name)), None)
    if there is None:
        check_listed(next((name for name in files if os.path.exists(name)), files[0]), where)
    return Path(there or files[0])
