"""Untrusted archives: no file leaves the target folder, and decompression bombs are refused before unpacking."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mezzo.files._bounds import MAX_UNPACKED, WEIGHTS, Bounds
from mezzo.files._errors import FileError

_CHUNK = 1 << 20
_TAR_HEADERS = 4096  # bytes per file that a tar stream may need for headers
#: By the first bytes of a file; long enough that no file name in a plain tar file starts with them.
_DECOMPRESSORS: dict[bytes, Callable[[Path], Any]] = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\x00": lzma.open,
}
#: Errors of reading a damaged archive. RuntimeError: it is encrypted, or uses an unknown compression.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    ArithmeticError,
)


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """One entry of an archive."""

    name: str
    size: int
    is_folder: bool
    trouble: str | None
    """Why it cannot be unpacked: it is neither a file nor a folder."""
    open: Callable[[], AbstractContextManager[IO[bytes]]]


def unpack(archive: Path, folder: Path, bounds: Bounds) -> None:
    """Unpack a tar or zip file into a folder that exists and is empty.

    Only files and folders are unpacked, with the permissions of new files. Links are refused even if they stay inside:
    a data set needs none, and without links a name without `..` cannot leave the folder.

    Raises:
        FileError: It is not an archive, is damaged or too large, or contains other entries.
    """
    with _report_damage(archive):
        room = min(bounds.room_for(archive), shutil.disk_usage(folder).free)
        with _opened(archive, bounds, room) as entries:
            for entry in entries:
                _write(entry, folder / _inside(entry, archive))


def read_entry(
    archive: Path, choose: Callable[[list[ArchiveEntry]], ArchiveEntry], bounds: Bounds = WEIGHTS
) -> tuple[str, bytes]:
    """Return name and content of one file of a tar or zip file, without writing to the disk.

    Args:
        archive: Its first bytes decide the format, not its name.
        choose: Called with all entries; returns one that is a file without `trouble`.
        bounds: Of the whole archive, not only of the file that is read.

    Raises:
        FileError: It is not an archive, is damaged or too large.
    """
    with _report_damage(archive), _opened(archive, bounds, bounds.room_for(archive)) as entries:
        entry = choose(list(entries))
        with entry.open() as source:
            return entry.name, b"".join(iter(lambda: source.read(_CHUNK), b""))


@contextmanager
def _report_damage(archive: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise FileError(f"{archive}: damaged or encrypted: {error or type(error).__name__}") from error
    except OSError as error:
        raise FileError(f"{archive}: cannot be unpacked: {error.strerror or error}") from error


@contextmanager
def _opened(archive: Path, bounds: Bounds, room: int) -> Iterator[Iterator[ArchiveEntry]]:
    """Yield an iterator over the entries; sizes and counts are checked before unpacking."""
    with archive.open("rb") as file:
        start = file.read(10)
    if re.match(rb"PK[\x03\x05\x07]", start):
        with zipfile.ZipFile(archive) as opened:
            entries = (_of_zip(opened, info) for info in opened.infolist())
            yield _counted(entries, archive, bounds, room)
        return
    # Not tarfile.open(archive): it guesses the format, and reads headers of any size at once.
    unpacked: Callable[[Path], Any] = next(
        (found for magic, found in _DECOMPRESSORS.items() if re.match(magic, start)), lambda path: path.open("rb")
    )
    with unpacked(archive) as stream:
        metered: Any = _Metered(stream, archive, room + _TAR_HEADERS * (bounds.files + 16))
        with _tar_of(metered, archive) as tar:
            yield _counted(_tar_entries(tar, metered), archive, bounds, room)


def _tar_of(stream: Any, archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=stream, mode="r:")
    except tarfile.ReadError as error:
        raise FileError(f"{archive}: neither a tar file (plain, gz, bz2, xz) nor a zip file") from error


def _tar_entries(tar: tarfile.TarFile, stream: _Metered) -> Iterator[ArchiveEntry]:
    for member in tar:
        yield _of_tar(tar, member)
    stream.seek(tar.offset)
    if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile treats a damaged header as the end
        raise tarfile.ReadError("a header cannot be read")
    while stream.read(_CHUNK):  # gz, bz2 and xz compare their checksum at the end
        pass


def _counted(entries: Iterable[ArchiveEntry], archive: Path, bounds: Bounds, room: int) -> Iterator[ArchiveEntry]:
    size = 0
    for number, entry in enumerate(entries, start=1):
        if entry.size < 0:
            raise ValueError(f"{entry.name!r} has a negative size")
        size += entry.size
        if size > room or number > bounds.files:
            limit = f"{room} bytes" if size > room else f"{bounds.files} files"
            raised = f", or set {MAX_UNPACKED} to a larger size" if size > room else ""
            raise FileError(f"{archive}: unpacks to more than {limit}; unpack it yourself and {bounds.advice}{raised}")
        yield entry


class _Metered:
    """A stream of a tar file that limits the size of headers, which no entry announces."""

    def __init__(self, source: IO[bytes], archive: Path, limit: int) -> None:
        self._source, self._archive, self._limit = source, archive, limit
        self.tell = source.tell

    def read(self, size: int) -> bytes:
        if size > _CHUNK:  # file contents are read in smaller pieces
            raise FileError(f"{self._archive}: damaged: a header of {size} bytes")
        self._check(self.tell() + size)
        return self._source.read(size)

    def seek(self, offset: int) -> int:
        self._check(offset)
        return self._source.seek(offset)

    def _check(self, position: int) -> None:
        if position > self._limit:
            raise FileError(f"{self._archive}: unpacks to more than {self._limit} bytes")


def _of_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArchiveEntry:
    kind = stat.S_IFMT(info.external_attr >> 16)  # 0 if the archive was not created on Unix
    trouble = None if kind in (0, stat.S_IFREG, stat.S_IFDIR) else _trouble(kind == stat.S_IFLNK)
    if not info.filename:  # zipfile cuts a name at a zero byte, and fails on an empty name
        trouble = "has no name"
    return ArchiveEntry(info.filename, info.file_size, info.filename.endswith("/"), trouble, lambda: archive.open(info))


def _of_tar(archive: tarfile.TarFile, member: tarfile.TarInfo) -> ArchiveEntry:
    def opened() -> Any:
        return archive.extractfile(member)

    trouble = None if member.isfile() or member.isdir() else _trouble(member.issym() or member.islnk())
    return ArchiveEntry(member.name, member.size, member.isdir(), trouble, opened)


def _trouble(is_link: bool) -> str:
    return "is a link" if is_link else "is a device or a pipe"


def stored_parts(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Return the files of a zip file written by torch, which does not compress: they fit into its size.

    Args:
        archive: Opened; only its list of files has been read.
        size: Size of the zip file in bytes.

    Raises:
        ValueError: A file is compressed, encrypted or duplicated, or they are larger than the zip file.
    """
    infos = archive.infolist()
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"its part {info.filename[:80]!r} is compressed or encrypted; torch writes no such files")
    if len({info.filename for info in infos}) < len(infos):
        raise ValueError("it has two parts of one name")
    if sum(info.file_size for info in infos) > size:
        raise ValueError("its parts are larger than the file")
    return infos


def _inside(entry: ArchiveEntry, archive: Path) -> PurePosixPath:
    """Return the path of an entry below the folder; raise FileError if it is outside, or not a file."""
    path = PurePosixPath(entry.name)
    trouble = entry.trouble
    if path.is_absolute():
        trouble = "is an absolute path"
    elif ".." in path.parts:
        trouble = "leads out by '..'"
    if trouble:
        raise FileError(f"{archive}: {entry.name!r} {trouble}: refused, nothing is put in place")
    return path


def _write(entry: ArchiveEntry, target: Path) -> None:
    if entry.is_folder:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with entry.open() as source, target.open("xb") as file:  # x: a second file of the same name is refused
        shutil.copyfileobj(source, file, _CHUNK)
