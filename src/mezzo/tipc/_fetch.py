"""An archive from a URL: its checksum is compared before it is opened, and nothing of it lands outside its folder."""

from __future__ import annotations

import hashlib
import http.client
import lzma
import re
import shutil
import stat
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from mezzo._errors import RunError
from mezzo.data import DataError

SCHEMES = ("https", "http", "file")
TIMEOUT_S = 60
_CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
#: What reading a damaged or odd archive raises. RuntimeError: it is encrypted, or packed by an odd method.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How much an archive may hold: more is a mistake or an attack. ImageNet fits, 138 GB in 1.4 million files."""

    archive_bytes: int = 200 << 30
    unpacked_bytes: int = 400 << 30
    files: int = 2_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    """What an archive holds under a name; `trouble` says why it is nothing that a data set needs."""

    name: str
    size: int
    is_folder: bool
    trouble: str | None
    open: Callable[[], AbstractContextManager[IO[bytes]]]


def check_request(url: str, sha256: str | None) -> None:
    """Raise DataError unless a URL can be fetched and its checksum is one."""
    if _scheme(url) not in SCHEMES:
        raise DataError(f"url {url!r}: must begin with {', '.join(f'{scheme}:' for scheme in SCHEMES)}")
    if sha256 is None:
        raise DataError(f"{url}: needs its checksum too; pass --sha256 SUM, as `sha256sum FILE` prints it")
    if not _SHA256.fullmatch(sha256):
        raise DataError(f"sha256 {sha256!r}: must be 64 hexadecimal digits, as `sha256sum FILE` prints them")


def _scheme(url: str) -> str:
    try:
        return urlsplit(url).scheme
    except ValueError:  # as http://[ raises
        return ""


def download(url: str, sha256: str, target: Path, bounds: Bounds) -> None:
    """Write what a URL holds to a file.

    Raises:
        RunError: It cannot be reached, or breaks off.
        DataError: It has another checksum, or is too large; the file is removed.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, target.open("wb") as file:
            while chunk := response.read(_CHUNK):
                size += len(chunk)
                if size > bounds.archive_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an odd URL
        target.unlink(missing_ok=True)
        raise RunError(f"{url}: cannot be fetched: {getattr(error, 'reason', error)}") from error
    if size > bounds.archive_bytes:
        target.unlink()
        raise DataError(f"{url}: larger than {bounds.archive_bytes} bytes; fetch it yourself and pass --data DIR")
    if digest.hexdigest() != sha256.lower():
        target.unlink()
        raise DataError(f"{url}: has the SHA-256 {digest.hexdigest()}, expected is {sha256.lower()}; it was not opened")


def unpack(archive: Path, folder: Path, bounds: Bounds) -> None:
    """Unpack a tar or zip file into a folder that exists and is empty.

    Files and folders alone are taken, with the permissions of new files. Links are refused even where they stay inside:
    a data set needs none, and without them a name without `..` cannot lead out.

    Raises:
        DataError: The archive is none, is damaged, too large, or holds anything else.
    """
    try:
        room = min(bounds.unpacked_bytes, shutil.disk_usage(folder).free)
        size = 0
        with closing(_entries(archive)) as entries:
            for number, entry in enumerate(entries, start=1):
                size += entry.size
                if size > room or number > bounds.files:
                    limit = f"{room} bytes" if size > room else f"{bounds.files} files"
                    raise DataError(
                        f"{archive.name}: unpacks to more than {limit}; unpack it yourself and pass --data DIR"
                    )
                _write(entry, folder / _inside(entry, archive))
    except _DAMAGE as error:
        raise DataError(f"{archive.name}: damaged or encrypted: {error}") from error
    except OSError as error:
        raise DataError(f"{archive.name}: cannot be unpacked: {error.strerror or error}") from error


def _entries(archive: Path) -> Generator[_Entry, None, None]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                yield _of_zip(opened, info)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for member in tar:
                yield _of_tar(tar, member)
    else:
        raise DataError(f"{archive.name}: neither a tar file (plain, gz, bz2, xz) nor a zip file")


def _of_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Entry:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where the archive was not made on Unix
    trouble = None if kind in (0, stat.S_IFREG, stat.S_IFDIR) else _trouble(kind == stat.S_IFLNK)
    return _Entry(info.filename, info.file_size, info.is_dir(), trouble, lambda: archive.open(info))


def _of_tar(archive: tarfile.TarFile, member: tarfile.TarInfo) -> _Entry:
    def opened() -> Any:
        return archive.extractfile(member)

    trouble = None if member.isfile() or member.isdir() else _trouble(member.issym() or member.islnk())
    return _Entry(member.name, member.size, member.isdir(), trouble, opened)


def _trouble(is_link: bool) -> str:
    return "is a link" if is_link else "is a device or a pipe"


def _inside(entry: _Entry, archive: Path) -> PurePosixPath:
    """Return the place of an entry below the folder; raises DataError if it is none, or no file."""
    path = PurePosixPath(entry.name)
    trouble = entry.trouble
    if path.is_absolute():
        trouble = "is an absolute path"
    elif ".." in path.parts:
        trouble = "leads out by '..'"
    if trouble:
        raise DataError(f"{archive.name}: {entry.name!r} {trouble}: refused, nothing is put in place")
    return path


def _write(entry: _Entry, target: Path) -> None:
    if entry.is_folder:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with entry.open() as source, target.open("xb") as file:  # x: a second file of the same name is no data set
        shutil.copyfileobj(source, file, _CHUNK)
