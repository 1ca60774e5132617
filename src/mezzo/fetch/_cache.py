"""The cache of downloads: each file has a record of size and checksum, which is compared at every use."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mezzo.errors import RunError
from mezzo.fetch._download import Progress, Received, finish, transfer
from mezzo.fetch._errors import FetchError, Unreachable
from mezzo.fetch._place import PART, RECORD, is_offline, place_of, split
from mezzo.files import WEIGHTS, Bounds, FileError, MiB, locked, open_regular, read_json, write_text

_ADVICE = "delete it and {place} to fetch the file again"


def cached(url: str, *, record: bool = True) -> Path | None:
    """Return the file of a URL if it is in the cache and unchanged.

    Args:
        url: http, https or file.
        record: Write the record of a file that was copied into the cache by hand. False if the file is not used
            yet, as it may be incomplete.

    Raises:
        FetchError: The file is not the one that was recorded, or cannot be read.
    """
    place = place_of(url)
    if not os.path.isfile(place):
        return None
    if split(url).scheme != "file":
        _check(url, place, record)
    return place


def fetch(url: str, *, progress: Progress | None = None, bounds: Bounds = WEIGHTS) -> Path:
    """Return the file of a URL from the cache; download it if missing. Other processes wait for the download.

    Args:
        url: http, https or file; a local file is not copied.
        progress: Called during a download.
        bounds: `archive_bytes` is the maximum size.

    Raises:
        RunError: It cannot be downloaded or written; the message names the path for a manual download.
        FetchError: The URL cannot be used, the file is too large, or the one in the cache has changed.
    """
    if (found := cached(url)) is not None:
        return found
    place = place_of(url)
    if split(url).scheme == "file":
        raise FetchError(f"{url}: there is no such file")
    if is_offline():
        raise RunError(f"{url}: MEZZO_OFFLINE is set and the file is not in the cache; put it at {place}")
    with locked(place.with_name(f".{place.name}.lock")):
        if cached(url) is None:  # no other process fetched it in the meantime
            part = place.with_name(f"{place.name}{PART}")
            try:
                received = transfer(url, part, bounds, progress)
            except Unreachable as error:
                raise Unreachable(f"{error}; fetch the file by other means and put it at {place}") from error
            _record(url, place, received)  # before the rename: no process sees the file without its record
            finish(part, place)
    return place


def recorded(place: Path) -> dict[str, Any] | None:
    """Return the record of a file in the cache; None if there is none.

    Raises:
        FetchError: The record is damaged.
    """
    path = _record_of(place)
    if not os.path.lexists(path):
        return None
    try:
        found = read_json(path, limit=MiB)
    except FileError as error:
        raise FetchError(f"{error}; {_ADVICE.format(place=place)}") from error
    known = found if isinstance(found, dict) else {}
    if type(known.get("size")) is not int or not isinstance(known.get("sha256"), str):
        raise FetchError(f"{path}: has no size or no checksum; {_ADVICE.format(place=place)}")
    return known


def _check(url: str, place: Path, record: bool) -> None:
    known = recorded(place)
    try:
        with open_regular(place, raising=FetchError) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        raise FetchError(f"{place}: cannot be read: {error.strerror or error}") from error
    if known is None and record:
        with suppress(RunError):  # a cache that is shared and read-only is fine
            _record(url, place, Received(size, sha256, None, None))
    elif known is not None and (size, sha256) != (known["size"], known["sha256"]):
        raise FetchError(
            f"{place}: has changed: {size} bytes with the SHA-256 {sha256}, recorded are {known['size']} bytes with "
            f"{known['sha256']}; delete it and {_record_of(place)} to fetch it again"
        )


def _record(url: str, place: Path, received: Received) -> None:
    entries = {
        "url": url,
        "size": received.size,
        "sha256": received.sha256,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "etag": received.etag,
        "last_modified": received.last_modified,
    }
    write_text(_record_of(place), json.dumps(entries, indent=1) + "\n")


def _record_of(place: Path) -> Path:
    return place.with_name(f"{place.name}{RECORD}")
