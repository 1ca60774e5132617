"""Checksums of all files of a folder, to detect damage: flipped bits, truncated files, files of another checkpoint.

They do not protect against forgery: anyone who can write to the folder can also write its manifest.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mezzo.errors import MezzoError
from mezzo.files._errors import FileError
from mezzo.files._json import parse_json
from mezzo.files._read import MiB, open_regular, read_bytes
from mezzo.files._write import write_file

MANIFEST = "manifest.json"
_FORMAT = "mezzo.manifest"
_VERSION = 1
_CHUNK = 4 * MiB


def write_manifest(folder: Path) -> None:
    """Write `manifest.json`: size and CRC-32 of every file in a folder and below.

    Raises:
        RunError: The system refuses to write.
        FileError: A file of the folder cannot be read again.
    """
    files = {name: [(folder / name).stat().st_size, _crc32(folder / name, FileError)] for name in _names(folder)}
    write_file(folder / MANIFEST, _text({"format": _FORMAT, "version": _VERSION, "files": files}))


def check_manifest(folder: Path, only: Iterable[str] | None = None, *, raising: type[MezzoError] = FileError) -> bool:
    """Compare the files of a folder with its manifest; return False if there is no manifest.

    Args:
        folder: Of a checkpoint.
        only: Names to compare; None: all files; files that the manifest does not list are then an error.
        raising: Class of the error.

    Raises:
        MezzoError: Of class `raising`: a file is missing, added, damaged or of another origin; the message names it.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return False
    listed = _listed(path, raising)
    names = set(listed) if only is None else set(only)
    # Hidden files do not count: file systems and desktops create some in any folder (.nfs..., .DS_Store).
    added = sorted(name for name in set(_names(folder)) - names if not name.rpartition("/")[2].startswith("."))
    if only is None and added:
        raise raising(f"{folder / added[0]}: is not in {MANIFEST}; the checkpoint was changed after it was written")
    for name in sorted(names):
        if name not in listed:
            raise raising(f"{folder / name}: is not in {MANIFEST}; the checkpoint was changed after it was written")
        size, crc32 = listed[name]
        if (found := _size(folder / name, raising)) != size:
            raise raising(f"{folder / name}: has {found} bytes, {size} were written; the checkpoint is damaged")
        if _crc32(folder / name, raising) != crc32:
            raise raising(f"{folder / name}: is not the file that was written (CRC-32); the checkpoint is damaged")
    return True


def _listed(path: Path, raising: type[MezzoError]) -> dict[str, tuple[int, str]]:
    data = read_bytes(path, limit=64 * MiB, raising=raising)
    try:
        content = parse_json(data)
        files = {str(name): (int(size), str(crc32)) for name, (size, crc32) in content["files"].items()}
        if outside := next((name for name in files if not _is_inside(name)), None):
            raise ValueError(f"{outside[:80]!r} leads out of the folder")
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError("of another kind")
        if data != _text({key: content[key] for key in ("format", "version", "files")}):
            raise ValueError("its own checksum does not fit")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise raising(f"{path}: is damaged ({error}); resume from another checkpoint") from error
    return files


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _text(content: dict[str, object]) -> bytes:
    """Return the content of the file; its last entry is a checksum of the rest, so damaged names are detected."""
    body = json.dumps(content, indent=1)
    return f'{body[:-2]},\n "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()


def _names(folder: Path) -> list[str]:
    """Return all files below a folder except the manifest, with `/` between their parts."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if name != MANIFEST)


def _size(path: Path, raising: type[MezzoError]) -> int:
    with open_regular(path, raising=raising) as file:
        return os.fstat(file.fileno()).st_size


def _crc32(path: Path, raising: type[MezzoError]) -> str:
    value, buffer = 0, bytearray(_CHUNK)
    view = memoryview(buffer)
    with open_regular(path, raising=raising) as file:
        try:
            while count := file.readinto(buffer):
                value = zlib.crc32(view[:count], value)
        except OSError as error:
            raise raising(f"{path}: cannot be read: {error.strerror or error}") from error
    return f"{value:08x}"
