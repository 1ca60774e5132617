"""List files: one sample a line, paths relative to a root or absolute, columns between separators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mezzo.data._errors import DataError


def list_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the text of every line of a list file that is not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such list file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: a list file is UTF-8 text, byte {error.start} is not") from error
    except OSError as error:
        raise DataError(f"{path}: the list file cannot be read ({error.strerror})") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.strip()


def file_under(root: str, name: str, where: str) -> str:
    """Return the path of a file that a list names: relative to the root, or absolute; `where` is the line.

    The file may lie outside of the root, by `..` or by its absolute path: lists that share images do that.

    Raises:
        DataError: The name is no file name.
    """
    if not name or "\0" in name:
        raise DataError(f"{where}: {name!r} is no file name")
    return os.path.join(root, name)


def existing_folder(path: str | Path, what: str) -> str:
    """Return the path of a folder, which must be there."""
    if not os.path.isdir(path):
        raise DataError(f"{what} {str(path)!r}: no such folder")
    return str(path)
