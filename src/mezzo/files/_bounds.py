"""Limits on the size of untrusted files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mezzo.files._errors import FileError

MAX_UNPACKED = "MEZZO_MAX_UNPACKED"
"""Environment variable that raises the limits of this file, in bytes; `8G` is 8 GiB."""
_ALWAYS_FITS = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of an archive. The defaults fit ImageNet, 138 GB in 1.4 M files."""

    archive_bytes: int = 200 << 30
    unpacked_bytes: int = 400 << 30
    files: int = 2_000_000
    ratio: int | None = None
    """Unpacked bytes per byte of the archive; None: any. Archives that unpack to less than 256 MiB are exempt."""
    advice: str = "pass --data DIR"
    """End of the sentence 'unpack it yourself and ...'."""

    def room_for(self, archive: Path) -> int:
        """Return the number of bytes that an archive may unpack to."""
        room = self.unpacked_bytes
        if self.ratio is not None:
            room = min(room, max(_ALWAYS_FITS, self.ratio * archive.stat().st_size))
        return max(room, raised_limit())


#: Compression factors: below 2 for trained weights, 20 for pruned ones, 1000 for zeros.
WEIGHTS = Bounds(
    archive_bytes=8 << 30, unpacked_bytes=8 << 30, files=10_000, ratio=100, advice="give the file of weights"
)


def unpacked_limit(packed: int) -> int:
    """Return the limit on the total bytes of the arrays in a weights file.

    Such files are not compressed; four times the file size leaves room for arrays that are referenced twice.

    Args:
        packed: Size of the file.

    Raises:
        FileError: The environment variable MEZZO_MAX_UNPACKED is not a valid size.

    >>> unpacked_limit(1000) == 256 << 20
    True
    >>> unpacked_limit(1 << 30) == 4 << 30
    True
    """
    return max(_ALWAYS_FITS, 4 * packed, raised_limit())


def raised_limit() -> int:
    """Return the limit that the environment variable MEZZO_MAX_UNPACKED sets, 0 if it is not set.

    Raises:
        FileError: It is not a valid size.
    """
    text = os.environ.get(MAX_UNPACKED, "").strip()
    found = re.fullmatch(r"([0-9]{1,18})([KMG]?)", text.upper())
    if text and not found:
        raise FileError(
            f"{MAX_UNPACKED}={text[:40]!r}: must be a number of bytes, optionally with the suffix K, M or G"
        )
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0


def too_large(size: int, limit: int) -> str:
    """Return the message for a refused file: its unpacked size, and how to raise the limit."""
    needed = -(-size >> 20)
    return f"unpacks to {size} bytes, the limit is {limit}; if you trust the file, set {MAX_UNPACKED}={needed}M"
