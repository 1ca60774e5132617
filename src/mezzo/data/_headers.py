"""The size that a JPEG or PNG file claims to have, before anything is decoded; Pillow takes far longer to say it."""

from __future__ import annotations

import struct

_PNG = b"\x89PNG\r\n\x1a\n"
#: Marks that begin a frame; those between that are missing begin tables.
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # marks without a length


def read_header(data: bytes) -> tuple[str, int, int] | None:
    """Return kind, width and height of a JPEG or PNG; None for anything else, or where they are not found."""
    if data.startswith(b"\xff\xd8"):
        return _read_jpeg(data)
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
        return "PNG", width, height
    return None


def _read_jpeg(data: bytes) -> tuple[str, int, int] | None:
    at, end = 2, len(data) - 9
    while at < end and data[at] == 0xFF:
        mark = data[at + 1]
        if mark == 0xFF:  # a fill byte
            at += 1
        elif mark in _ALONE:
            at += 2
        elif mark in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return "JPEG", width, height
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return None
