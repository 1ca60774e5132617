"""Reads the image size from the header of a JPEG or PNG file, without decoding; much faster than Pillow."""

from __future__ import annotations

import struct

_PNG = b"\x89PNG\r\n\x1a\n"
#: Marks that begin a frame; those between that are missing begin tables.
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # marks without a length


_RIFF = b"RIFF"
_STARTS = {
    b"\xff\xd8": "JPEG",
    _PNG: "PNG",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}


def kind_of(data: bytes) -> str | None:
    """Return the format of a file by its first bytes; None if it is unknown."""
    if data.startswith(_RIFF) and data[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for start, kind in _STARTS.items() if data.startswith(start)), None)


def read_header(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG or PNG file; None for other formats, or if they are not found."""
    if data.startswith(b"\xff\xd8"):
        return _read_jpeg(data)
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    return None


def _read_jpeg(data: bytes) -> tuple[int, int] | None:
    at, end = 2, len(data) - 9
    while at < end and data[at] == 0xFF:
        mark = data[at + 1]
        if mark == 0xFF:  # a fill byte
            at += 1
        elif mark in _ALONE:
            at += 2
        elif mark in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None


def without_profile(data: bytes) -> bytes:
    """Return a PNG file without its colour profiles, which OpenCV ignores: libpng prints the name of a damaged one."""
    end = data.find(b"IDAT")
    while (at := data.find(b"iCCP", 0, end) - 4) >= 0:
        size = 12 + int.from_bytes(data[at : at + 4])
        data = data[:at] + data[at + size :]
        end = data.find(b"IDAT")
    return data
