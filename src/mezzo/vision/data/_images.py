"""Reads image and label files; an error is one line that names the file."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mezzo.files import plain, read_bytes, shown_path
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._headers import kind_of, read_header, without_profile

MAX_PIXELS = 1 << 26
"""8192 x 8192; larger images are treated as decompression bombs."""

MAX_BYTES = 1 << 30
"""Maximum size of an image file; 8192 x 8192 pixels of 16 bits and four channels take 512 MiB."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
"""Suffixes of image files, in lower case."""

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
"""Allowed image formats, detected by content. Pillow has dozens more, and starts Ghostscript for EPS."""

LABEL_FORMATS = (*IMAGE_FORMATS, "GIF")
"""Allowed label formats; the labels of the DRIVE data set are GIF files."""

MAX_SCANS = 100
"""Maximum number of scans of a progressive JPEG. Encoders write about 10; thousands fit into 30 kB."""

_SCAN = b"\xff\xda"
_set_log_level = cv2.utils.logging.setLogLevel  # returns the level before
_REFUSED = (
    OSError,
    ValueError,
    SyntaxError,  # a broken PNG chunk
    struct.error,
    LookupError,
    ArithmeticError,
    TypeError,
    RuntimeError,
    Image.DecompressionBombError,
    Warning,
)
"""Errors of Pillow for a damaged file."""


def read_image(path: str | Path) -> NDArray[np.uint8]:
    """Return an image file as (H, W, 3) RGB; grey, 16-bit and transparent ones are converted.

    Raises:
        DataError: The file is missing, empty, truncated, too large or not an image.
    """
    return decode_image(read_bytes(path, limit=MAX_BYTES, raising=DataError), shown_path(path))


def decode_image(data: bytes, name: str) -> NDArray[np.uint8]:
    """Return the (H, W, 3) RGB image in the bytes of a file; `name` is for messages."""
    kind = _check_header(data, name, IMAGE_FORMATS)
    if _is_cut_off(data, kind):
        raise DataError(f"{name}: the image is cut off; copy or download the file again")
    if kind == "PNG":
        data = without_profile(data)
    level = _set_log_level(0)  # OpenCV prints messages for a damaged file; ours name the file
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DataError(f"{name}: OpenCV cannot decode the image ({error.err})") from error
    finally:
        _set_log_level(level)
    if image is None:
        raise DataError(f"{name}: OpenCV cannot decode the image; it is damaged or of an unknown kind")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)  # type: ignore[return-value]  # the flag above makes it 8 bit


def read_label(path: str | Path) -> NDArray[np.uint8]:
    """Return a label file as (H, W) class ids; a palette image gives its indices, not its colours.

    Raises:
        DataError: The file is missing, empty, damaged, too large, or has more than one channel or 8 bits.
    """
    data, name = read_bytes(path, limit=MAX_BYTES, raising=DataError), shown_path(path)
    _check_header(data, name, LABEL_FORMATS)
    with _open(data, name, LABEL_FORMATS) as label:
        if label.mode not in ("L", "P"):
            raise DataError(
                f"{name}: a label has one channel of 8 bits (Pillow's mode L or P), this file has mode {label.mode}"
            )
        try:
            return np.array(label, dtype=np.uint8)
        except _REFUSED as error:
            raise DataError(f"{name}: the label cannot be decoded ({_first_line(error)})") from error


def _check_header(data: bytes, name: str, formats: tuple[str, ...]) -> str:
    """Return the format of an image; raise if it is not allowed, or if decoding would take too much memory or time."""
    if not data:
        raise DataError(f"{name}: the file is empty")
    kind = kind_of(data)
    if kind not in formats:
        raise DataError(f"{name}: not an image file (allowed: {', '.join(formats)})")
    width, height = read_header(data) or _pillow_size(data, name, formats)
    _check_size(width, height, name)
    # Most JPEGs have one scan: `find` stops early at it, while `count` goes through all bytes.
    if kind == "JPEG" and data.find(_SCAN) != data.rfind(_SCAN) and data.count(_SCAN) > MAX_SCANS:
        raise DataError(f"{name}: a JPEG of more than {MAX_SCANS} scans is not decoded; save it again")
    return kind


def _open(data: bytes, name: str, formats: tuple[str, ...]) -> Image.Image:
    """Return the image with only its header read."""
    try:
        if kind_of(data) != "TIFF":
            return Image.open(io.BytesIO(data), formats=formats)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow only warns of damage to a TIFF
            return Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name}: has more than the {MAX_PIXELS} pixels that are read; cut it into tiles") from error
    except _REFUSED as error:  # an OSError if it is none of the formats
        raise DataError(f"{name}: the image cannot be opened; it is damaged") from error


def _pillow_size(data: bytes, name: str, formats: tuple[str, ...]) -> tuple[int, int]:
    with _open(data, name, formats) as header:
        return header.size


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{name}: {width} x {height} pixels are more than the {MAX_PIXELS} that are read; cut it into tiles"
        )


def _is_cut_off(data: bytes, kind: str) -> bool:
    """Return whether a JPEG or PNG file is truncated; OpenCV would silently fill the rest with grey."""
    if kind == "JPEG":  # inside a scan FF is never followed by D9, so the last end marker follows the last scan
        return data.find(_SCAN, max(data.rfind(b"\xff\xd9"), 0)) >= 0
    return kind == "PNG" and b"IEND" not in data[-1 << 16 :]


def _first_line(error: BaseException) -> str:
    return plain((str(error) or type(error).__name__).splitlines()[0])[:200]
