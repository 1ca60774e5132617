"""Opens untrusted files: only regular files, up to a size limit; every error names the file.

A named pipe blocks its reader, `/dev/zero` never ends, and opening a device can act on it. Therefore only regular files
are opened, and nothing is read beyond the limit.
"""

from __future__ import annotations

import codecs
import os
import stat
from io import BufferedReader

from mezzo.errors import MezzoError
from mezzo.files._errors import FileError
from mezzo.files._plain import one_line

MiB = 1 << 20
MAX_TEXT = 64 * MiB
"""Default limit for text: a list of a million images has about 60 MB."""
MAX_BYTES = 64 << 30
"""Default limit for other files. A sparse file can claim any size without taking space on the disk."""


def open_regular(path: str | os.PathLike[str], *, raising: type[MezzoError] = FileError) -> BufferedReader:
    """Open a regular file for reading; links are followed.

    Args:
        path: The file.
        raising: Class of the error.

    Raises:
        MezzoError: Of class `raising`: there is no such file, it cannot be opened, or it is a folder, pipe or device.
    """
    descriptor, _ = _open(path, raising)
    return os.fdopen(descriptor, "rb")


def check_regular(path: str | os.PathLike[str], *, raising: type[MezzoError] = FileError) -> None:
    """Raise unless a path leads to a regular file; the file is not opened.

    Raises:
        MezzoError: Of class `raising`, with the message of `open_regular`.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise _refusal(path, error, raising) from error
    if problem := _irregular(mode):
        raise raising(f"{shown_path(path)}: {problem}; give a regular file")


def read_bytes(path: str | os.PathLike[str], *, limit: int = MAX_BYTES, raising: type[MezzoError] = FileError) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file; links are followed.
        limit: The largest size in bytes that is read.
        raising: Class of the error.

    Raises:
        MezzoError: Of class `raising`: the file cannot be read, is not regular, or is larger than `limit`.
    """
    descriptor, size = _open(path, raising)
    try:
        data = b"" if size > limit else _read_all(descriptor, size, limit)
    except OSError as error:
        raise _refusal(path, error, raising) from error
    except MemoryError as error:
        raise raising(f"{shown_path(path)}: {size} bytes do not fit into memory") from error
    finally:
        os.close(descriptor)
    if size > limit or len(data) > limit:
        raise raising(f"{shown_path(path)}: larger than {limit} bytes, the limit for such a file")
    return data


def read_text(path: str | os.PathLike[str], *, limit: int = MAX_TEXT, raising: type[MezzoError] = FileError) -> str:
    """Return the content of a regular file as text; UTF-8, with or without a byte order mark.

    Raises:
        MezzoError: Of class `raising`: see `read_bytes`; or the content is not UTF-8.
    """
    data = read_bytes(path, limit=limit, raising=raising).removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise raising(f"{shown_path(path)}:{line}: not UTF-8 text (byte {error.start})") from error


def _open(path: str | os.PathLike[str], raising: type[MezzoError]) -> tuple[int, int]:
    """Return the descriptor of a regular file, open for reading, and the size that it claims."""
    check_regular(path, raising=raising)
    try:
        # O_NONBLOCK: a pipe that has just replaced the file must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise _refusal(path, error, raising) from error
    status = os.fstat(descriptor)
    if problem := _irregular(status.st_mode):
        os.close(descriptor)
        raise raising(f"{shown_path(path)}: {problem}; give a regular file")
    return descriptor, status.st_size


def _read_all(descriptor: int, size: int, limit: int) -> bytes:
    """Return the content, at most slightly more than `limit`; the file may have grown, and files of /proc claim 0 bytes."""
    if 0 < size < 64 * MiB:  # most files: one call, at 5 microseconds half of what a file object takes
        data = os.read(descriptor, size + 1)
        if len(data) == size:
            return data
        os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        pieces = [file.read(size + 1)]
        total = len(pieces[0])
        while pieces[-1] and total <= limit:
            pieces.append(file.read(MiB))
            total += len(pieces[-1])
    return b"".join(pieces) if len(pieces) > 2 else pieces[0]  # avoids a copy in the usual case


def _refusal(path: str | os.PathLike[str], error: OSError | ValueError, raising: type[MezzoError]) -> MezzoError:
    """Return the error for a system error, or for a zero byte in the name."""
    if isinstance(error, FileNotFoundError):
        return raising(f"{shown_path(path)}: no such file")
    return raising(f"{shown_path(path)}: cannot be read: {getattr(error, 'strerror', None) or error}")


def shown_path(path: str | os.PathLike[str]) -> str:
    r"""Return a path as one printable line: file names can contain anything except `/` and a zero byte.

    >>> shown_path("a\x1b[31mb\nc.png")
    'ab c.png'
    """
    return one_line(os.fspath(path))


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a regular file."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _irregular(mode: int) -> str | None:
    """Return what a file is if it is not regular."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file"
