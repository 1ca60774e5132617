"""The path of a URL in the cache: predictable, and always inside the cache."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import url2pathname

from mezzo.fetch._errors import FetchError

SCHEMES = ("https", "http", "file")
_URL = re.compile(r"(?:https?|file):/", re.IGNORECASE)
_ODD = re.compile(r"[^\w.+=@%~,:-]", re.ASCII)
#: Suffixes of the files of the cache itself.
RECORD, PART = ".json", ".part"


def is_url(text: str) -> bool:
    """Return whether a text is a URL of http, https or file.

    >>> [is_url(text) for text in ("HTTPS://host/a.pdparams", "file:///a", "weights/a.pdparams", "s3://b/c")]
    [True, True, False, False]
    """
    return _URL.match(text) is not None


def is_offline() -> bool:
    """Return whether the user forbids network access: MEZZO_OFFLINE is 1, true or yes."""
    return os.environ.get("MEZZO_OFFLINE", "").strip().lower() in ("1", "true", "yes")


def split(url: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        FetchError: It is not a valid URL of http, https or file.
    """
    if not url.isprintable():
        raise FetchError(f"url {url!r}: has characters that cannot be printed")
    try:
        parts = urlsplit(url)
        if parts.username is not None:  # do not print the password
            raise FetchError(f"a URL of {parts.hostname} with a user name: not supported; fetch the file yourself")
        is_complete = parts.scheme == "file" or bool(parts.hostname and parts.port != 0)
    except ValueError:  # http://[ raises it, and the port of http://host:x
        raise FetchError(f"url {url!r}: cannot be read as a URL") from None
    if parts.scheme not in SCHEMES:
        raise FetchError(f"url {url!r}: must begin with {', '.join(f'{scheme}:' for scheme in SCHEMES)}")
    if not is_complete:
        raise FetchError(f"url {url!r}: names no host")
    return parts


def place_of(url: str) -> Path:
    """Return the path of a URL in the cache; for a `file:` URL the path of the file itself.

    `https://host/a/b.tar.gz` becomes `$MEZZO_HOME/weights/host/a/b.tar.gz`. A URL with a query, or with unusual
    characters, gets a hash in its name. http: and https: URLs of the same path share a file.

    Raises:
        FetchError: The URL cannot be fetched, or names no file.
    """
    parts = split(url)
    if parts.scheme == "file":
        return _local_file(url, parts)
    host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    names = parts.path.split("/")[1:]
    if not names or not names[-1]:
        raise FetchError(f"{url}: names a folder; give the URL of a file")
    *folders, name = (_clean(part) for part in (host, *names) if part)
    is_plain = [*folders, name] == [host, *names] and not parts.query
    if not is_plain or name.endswith((RECORD, PART)):
        digest = hashlib.sha256(f"{host}{parts.path}?{parts.query}".encode(errors="surrogateescape")).hexdigest()
        stem, dot, suffix = name.partition(".")
        name = f"{stem}-{digest[:12]}{dot}{suffix}"
    return _home().joinpath("weights", *folders, name)


def _clean(part: str) -> str:
    """Return a part of a URL as a safe file name: not hidden, without `..`, not too long; the suffix is kept."""
    name = _ODD.sub("_", part)[-150:]
    return f"_{name[1:]}" if name.startswith(".") else name


def _local_file(url: str, parts: SplitResult) -> Path:
    path = Path(url2pathname(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise FetchError(f"{url}: must name a file of this machine, as file:///folder/file")
    return path


def _home() -> Path:
    home = os.environ.get("MEZZO_HOME")
    cache = os.environ.get("XDG_CACHE_HOME")
    path = os.path.expanduser(home or os.path.join(cache or "~/.cache", "mezzo"))
    if path.startswith("~"):
        raise FetchError("there is no home folder to keep weights in; set MEZZO_HOME to a folder")
    return Path(path).absolute()
