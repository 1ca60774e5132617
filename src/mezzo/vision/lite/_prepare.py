"""Lite data: small sets that are drawn, the same each time, good enough to learn from, made in seconds."""

from __future__ import annotations

import inspect
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.errors import unknown_choice
from mezzo.files import FileError, MiB, parse_json, read_json
from mezzo.vision.data import DataError
from mezzo.vision.lite._draw import Progress
from mezzo.vision.lite._person import make_mini_supervisely
from mezzo.vision.lite._shapes import make_imagenet_lite
from mezzo.vision.lite._street import make_cityscapes

LITE_MARKER = ".mezzo-lite.json"
"""Says that a folder is complete, and what it is."""

VERSION = 1
"""Counts up when the same options give other pixels."""

_makers: dict[str, Callable[..., None]] = {
    "imagenet_lite": make_imagenet_lite,
    "mini_supervisely": make_mini_supervisely,
    "cityscapes": make_cityscapes,
}

LITE = tuple(_makers)
"""Names that `prepare` knows."""


def prepare(
    name: str, directory: str | Path, *, progress: Callable[[int, int], None] | None = None, **options: Any
) -> Path:
    """Return the folder of a lite data set, made now unless it is there.

    The set is drawn in a folder beside and then renamed: `directory` holds all of it or nothing.

    Args:
        name: One of `LITE`.
        directory: The folder that becomes the root of the set; absent or empty, or made by an earlier call.
        progress: Called with the number of files done and of all files.
        options: `size` and `count`, as the function of the set says (`mezzo.vision.lite._shapes`, ...).

    Raises:
        ValueError: There is no such set or option; the message names the nearest.
        DataError: The folder holds something else.
    """
    if name not in _makers:
        raise ValueError(unknown_choice("lite data set", name, LITE))
    described = {"name": name, "version": VERSION, "options": _options(name, options)}
    target = Path(directory)
    if not _is_made(target, described):
        _make(target, described, progress or _silent)
    return target


def _options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return all options of a set, the given ones over the defaults, as JSON would give them back."""
    parameters = inspect.signature(_makers[name]).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    for key in given:
        if key not in known:
            raise ValueError(f"{name}: " + unknown_choice("option", key, known))
    merged: dict[str, Any] = parse_json(json.dumps({**known, **given}))
    return merged


def _is_made(target: Path, described: dict[str, Any]) -> bool:
    """Return whether the folder is the set that is asked for; a folder with anything else in it is an error."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return False
    found = _read_marker(target / LITE_MARKER)
    if found is None:
        raise DataError(f"{target}: not empty and not made by this command; choose another folder")
    if found != described:
        raise DataError(
            f"{target}: holds {found.get('name')} of version {found.get('version')} with {found.get('options')}, asked is "
            f"{described['name']} of version {VERSION} with {described['options']}; remove it or choose another folder"
        )
    return True


def _read_marker(path: Path) -> dict[str, Any] | None:
    """Return what a marker says; None if there is none that can be read."""
    try:
        found = read_json(path, limit=MiB)
    except FileError:
        return None
    return found if isinstance(found, dict) else None


def _make(target: Path, described: dict[str, Any], progress: Progress) -> None:
    """Draw a set beside its place, then rename it."""
    unfinished = target.absolute().parent / f".{target.name}.{secrets.token_hex(4)}.unfinished"
    try:
        unfinished.mkdir(parents=True)
        _makers[described["name"]](unfinished, progress, **described["options"])
        (unfinished / LITE_MARKER).write_text(json.dumps(described, indent=1), encoding="utf-8")
        _rename(unfinished, target, described)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, target: Path, described: dict[str, Any]) -> None:
    """Rename a folder to its place, unless another process was faster with the same set."""
    try:
        unfinished.rename(target)
    except OSError:
        if not _is_made(target, described):
            raise


def _silent(done: int, total: int) -> None:
    """Show no progress."""
