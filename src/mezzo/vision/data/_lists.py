"""List files: one sample per line, paths relative to a root or absolute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mezzo.files import check_regular, read_text, shown_path
from mezzo.vision.data._errors import DataError

MAX_LIST = 1 << 30
"""Maximum bytes of a list file; 10 million images take about 600 MB."""


def read_list_file(path: Path) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and the text of every line of a list file that is not blank.

    Raises:
        DataError: It cannot be read, is not UTF-8, or is not a regular file.
    """
    if not os.path.lexists(path):
        raise DataError(f"{shown_path(path)}: no such list file")
    text = read_text(path, limit=MAX_LIST, raising=DataError)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{shown_path(path)}:{number}", line.strip()


def listed_path(root: str, name: str, where: str) -> str:
    """Return the path of a listed file, relative to the root or absolute; `where` names the line in errors.

    The file may lie outside the root, by `..` or an absolute path, as in lists that share images.

    Raises:
        DataError: The name is not a valid file name.
    """
    if not name or "\0" in name:
        raise DataError(f"{where}: {name!r} is not a file name")
    return os.path.join(root, name)


def check_listed(path: str, where: str) -> None:
    """Raise DataError unless a listed file exists and is regular; `where` names the line."""
    try:
        check_regular(path, raising=DataError)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def existing_folder(path: str | Path, what: str) -> str:
    """Return the path of a folder; raise DataError if it does not exist."""
    if not os.path.isdir(path):
        raise DataError(f"{what} {str(path)!r}: no such folder")
    return str(path)
