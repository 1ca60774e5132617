"""Downloads that continue after a broken connection: only the missing part is requested again."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mezzo._version import version_of
from mezzo.fetch._errors import FetchError, Unreachable
from mezzo.fetch._place import PART, RECORD, is_offline, place_of, split
from mezzo.files import (
    Bounds,
    FileError,
    MiB,
    check_regular,
    flush,
    open_regular,
    read_json,
    report_write_errors,
    say,
    write_text,
)

TIMEOUT_S = 15.0
"""Timeout of a connection, and of each read."""
PAUSES_S: tuple[float, ...] = (0.5, 2.0)
"""Pauses before further attempts."""

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes received and the size of the file, None if unknown."""

_CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d+/(?:(\d{1,18})|\*)")
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_LASTING = (FileNotFoundError, IsADirectoryError, PermissionError, ssl.SSLCertVerificationError)


@dataclass(frozen=True, slots=True)
class Received:
    """A completed download, with the version that the server reported."""

    size: int
    sha256: str
    etag: str | None
    last_modified: str | None


def check_request(url: str, sha256: str | None) -> None:
    """Raise FetchError unless the URL and the checksum are valid."""
    split(url)
    if sha256 is None:
        raise FetchError(f"{url}: needs its checksum too; pass --sha256 SUM, as `sha256sum FILE` prints it")
    if not _SHA256.fullmatch(sha256):
        raise FetchError(f"sha256 {sha256!r}: must be 64 hexadecimal digits, as `sha256sum FILE` prints them")


def download(url: str, sha256: str, target: Path, bounds: Bounds) -> None:
    """Download a URL to a file outside the cache.

    Raises:
        RunError: It cannot be reached, or the connection breaks.
        FetchError: The checksum differs, or it is too large; nothing is kept.
    """
    part = target.with_name(f"{target.name}{PART}")
    received = transfer(url, part, bounds)
    if received.sha256 != sha256.lower():
        _discard(part)
        raise FetchError(f"{url}: has the SHA-256 {received.sha256}, expected is {sha256.lower()}; it was not opened")
    finish(part, target)


def finish(part: Path, target: Path) -> None:
    """Rename a complete download to its final path."""
    with report_write_errors(target):
        os.replace(part, target)
        flush(target.parent)
    _discard(part)


def transfer(url: str, part: Path, bounds: Bounds, progress: Progress | None = None) -> Received:
    """Download a URL into a file; continue an earlier download if the server still has that version.

    Raises:
        Unreachable: After several attempts, or at once if waiting does not help. What came is kept.
        RunError: The file cannot be written.
        FetchError: It is larger than `bounds.archive_bytes`; nothing is kept.
    """
    if is_offline() and split(url).scheme != "file":
        raise Unreachable(f"{url}: cannot be fetched: MEZZO_OFFLINE is set")
    for pause_s in (*PAUSES_S, None):
        try:
            return _attempt(url, part, bounds, progress or (lambda done, total: None))
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason, is_lasting = _explain(error)
            if pause_s is None or is_lasting:
                raise Unreachable(f"{url}: cannot be fetched: {reason}") from error
            if progress is not None:
                say(f"{url}: {reason}; trying again", err=True)
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _attempt(url: str, part: Path, bounds: Bounds, progress: Progress) -> Received:
    offset, validator = _received_part(url, part)
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset else {}
    try:
        response = _open(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE or not offset:
            raise
        error.close()
        _discard(part)
        return _attempt(url, part, bounds, progress)
    with response:
        if response.status in (None, http.client.OK):  # None: a local file
            offset = 0
        elif response.status != http.client.PARTIAL_CONTENT:
            raise ValueError(f"the server answered {response.status}")
        elif not _continues(response.headers, offset, validator):
            if not offset:
                raise ValueError("the server sends a part where the whole was asked for")
            response.close()
            _discard(part)
            return _attempt(url, part, bounds, progress)
        if not offset:
            _begin(url, part, response.headers)
        return _receive(response, url, part, offset, bounds, progress)


def _receive(response: Any, url: str, part: Path, offset: int, bounds: Bounds, progress: Progress) -> Received:
    """Append the body of a response to a part; the checksum is that of the whole file."""
    total = _total(response, offset)
    size = offset
    with report_write_errors(part):
        file = part.open("ab")
    with file:
        digest = _digest(part)
        progress(size, total)
        # read1, as read loses bytes received before a break; it may wait after the last byte (fixed in Python 3.11.8).
        while (total is None or size < total) and (chunk := response.read1(_CHUNK)):
            size += len(chunk)
            if max(size, total or 0) > bounds.archive_bytes:
                break
            digest.update(chunk)
            with report_write_errors(part):
                file.write(chunk)
                file.flush()
            progress(size, total)
    if max(size, total or 0) > bounds.archive_bytes:
        _discard(part)
        raise FetchError(f"{url}: larger than {bounds.archive_bytes} bytes; fetch it yourself and {bounds.advice}")
    if total is not None and size != total:
        raise ConnectionError(f"the connection broke after {size} of {total} bytes")
    with report_write_errors(part):
        flush(part)
    headers = response.headers
    return Received(size, digest.hexdigest(), headers.get("ETag"), headers.get("Last-Modified"))


def _total(response: Any, offset: int) -> int | None:
    """Return the size of the whole file; None if the server does not report it."""
    if offset and (found := _CONTENT_RANGE.fullmatch(response.headers["Content-Range"])) and found[2]:
        return int(found[2])
    length: int | None = getattr(response, "length", None)  # None for chunks, and for local files
    return None if length is None else offset + length


def _digest(path: Path) -> Any:
    with report_write_errors(path), open_regular(path, raising=FetchError) as file:
        return hashlib.file_digest(file, "sha256")


# State of an interrupted download


def _received_part(url: str, part: Path) -> tuple[int, str]:
    """Return the number of received bytes and their version; 0 if the download cannot be continued."""
    try:
        state = read_json(_state_of(part), limit=MiB)
        if state["url"] == url and isinstance(state["validator"], str):
            return part.stat().st_size, state["validator"]
    except (FileError, OSError, LookupError, TypeError):
        pass  # start from the beginning
    return 0, ""


def _begin(url: str, part: Path, headers: Mapping[str, str]) -> None:
    """Remove an old part; record the version of the new one if the server reports it."""
    _discard(part)
    if validator := _validator(headers):
        write_text(_state_of(part), json.dumps({"url": url, "validator": validator}))


def _discard(part: Path) -> None:
    with report_write_errors(part):
        part.unlink(missing_ok=True)
        _state_of(part).unlink(missing_ok=True)


def _state_of(part: Path) -> Path:
    return part.with_name(f"{part.name}{RECORD}")


def _validator(headers: Mapping[str, str]) -> str | None:
    """Return the exact version: a strong ETag or a date, as If-Range does not accept a weak ETag."""
    etag, date = headers.get("ETag"), headers.get("Last-Modified")
    given = etag if etag and not etag.startswith("W/") else date
    return given if given and given.isprintable() else None


def _continues(headers: Mapping[str, str], offset: int, validator: str) -> bool:
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    return found is not None and 0 < offset == int(found[1]) and _validator(headers) in (None, validator)


# HTTP


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only; urllib would go to ftp too."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.HTTPError(newurl, code, "redirect", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_REMOTE: tuple[type[urllib.request.BaseHandler], ...] = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    _Redirects,
)


def _open(url: str, headers: dict[str, str]) -> Any:
    """Return the response to a request. A remote URL cannot lead to a local file: its opener has no handler for that."""
    if split(url).scheme == "file":
        try:
            check_regular(place_of(url))  # a pipe would block, and a device would be endless
        except FileError as error:
            raise FetchError(f"{url}: cannot be fetched: {error}") from error
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.FileHandler,) if split(url).scheme == "file" else _REMOTE:
        opener.add_handler(handler())
    agent = {"User-Agent": f"mezzo/{version_of() or 'dev'}"}
    return opener.open(urllib.request.Request(url, headers=agent | headers), timeout=TIMEOUT_S)


def _explain(error: Exception) -> tuple[str, bool]:
    """Return the reason as text, and whether another attempt is useless."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code // 100 == 3:
            return "the server redirects in a circle, or to what is neither http: nor https:", True
        words = http.client.responses.get(error.code, "")
        return f"the server answered {error.code} {words}".strip(), error.code not in _TEMPORARY
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    is_lasting = isinstance(cause, _LASTING) or not isinstance(cause, OSError | http.client.HTTPException)
    if isinstance(cause, socket.gaierror):
        is_lasting = cause.errno != socket.EAI_AGAIN  # a name that does not exist, or no network
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split()), is_lasting or isinstance(cause, http.client.InvalidURL)
