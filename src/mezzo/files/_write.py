"""Atomic writing: files are written, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mezzo.errors import RunError


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Turn a system error while writing into a one-line `RunError` that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: cannot be written: {reason}; check space and permissions, then try again") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; an older one stays until the new one is on the disk. The folder is created.

    A link with the name of the file is replaced, not followed: in an untrusted folder it could lead anywhere. The new
    file has the permissions of the old one.

    Raises:
        RunError: The file cannot be written.
    """
    part = path.with_name(f".tmp-{path.name[:100]}-{os.getpid()}")
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(data)
            if path.exists() and not path.is_symlink():
                part.chmod(stat.S_IMODE(path.stat().st_mode))
            flush(part)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8; see `write_file`."""
    write_file(path, text.encode())


def flush(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def flush_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with all its contents."""
    for place, _folders, files in os.walk(folder):
        for name in files:
            flush(Path(place, name))
        flush(Path(place))
