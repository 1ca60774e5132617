"""Image and label files into arrays; a file that cannot be used is one line that names it."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from mezzo.data._errors import DataError
from mezzo.data._headers import read_header

MAX_PIXELS = 1 << 26
"""More than 8192 x 8192 is taken for a decompression bomb."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
"""Files of an image folder that are images, in lower case."""

_REFUSED = (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
# SyntaxError is what Pillow raises for a broken PNG chunk.


def read_image(path: str | Path) -> NDArray[np.uint8]:
    """Return an image file as (H, W, 3) RGB; grey, 16-bit and transparent ones are converted.

    Raises:
        DataError: The file is missing, empty, cut off, too large or no image.
    """
    return decode_image(_read_bytes(path), str(path))


def decode_image(data: bytes, name: str) -> NDArray[np.uint8]:
    """Return the (H, W, 3) RGB image in the bytes of a file; `name` is for messages."""
    if not data:
        raise DataError(f"{name}: the file is empty")
    kind, width, height = read_header(data) or _read_any_header(data, name)
    _check_size(width, height, name)
    if _is_cut_off(data, kind):
        raise DataError(f"{name}: the image is cut off; copy or download the file again")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DataError(f"{name}: OpenCV cannot decode the image ({error.err})") from error
    if image is None:
        raise DataError(f"{name}: OpenCV cannot decode the image; it is damaged or of an unknown kind")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)  # type: ignore[return-value]  # the flag above makes it 8 bit


def read_label(path: str | Path) -> NDArray[np.uint8]:
    """Return a label file as (H, W) class ids; a palette image gives its indices, not its colours.

    Raises:
        DataError: The file is missing, empty, damaged, too large, or has more than one channel or 8 bits.
    """
    data = _read_bytes(path)
    if not data:
        raise DataError(f"{path}: the file is empty")
    _, width, height = read_header(data) or _read_any_header(data, str(path))
    _check_size(width, height, str(path))
    with _open(data, str(path)) as label:
        if label.mode not in ("L", "P"):
            raise DataError(
                f"{path}: a label has one channel of 8 bits (Pillow's mode L or P), this file has mode {label.mode}"
            )
        try:
            return np.array(label, dtype=np.uint8)
        except _REFUSED as error:
            raise DataError(f"{path}: the label cannot be decoded ({_first_line(error)})") from error


def _read_bytes(path: str | Path) -> bytes:
    """Return what a file holds, or the reason why it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise DataError(f"{path}: cannot be read ({_first_line(error)})") from error


def _open(data: bytes, name: str) -> Image.Image:
    """Return the image with only its header read."""
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"{name}: not an image file") from error
    except _REFUSED as error:
        raise DataError(f"{name}: the image cannot be opened ({_first_line(error)})") from error


def _read_any_header(data: bytes, name: str) -> tuple[str | None, int, int]:
    with _open(data, name) as header:
        return header.format, header.width, header.height


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{name}: {width} x {height} pixels are more than the {MAX_PIXELS} that are read; cut it into tiles"
        )


def _is_cut_off(data: bytes, kind: str | None) -> bool:
    """Return whether a JPEG or PNG file ends early; OpenCV would fill the rest with grey and say nothing."""
    if kind == "JPEG":  # inside a scan FF is never followed by D9, so the last end mark lies behind the last scan
        return data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")
    return kind == "PNG" and b"IEND" not in data[-1 << 16 :]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
