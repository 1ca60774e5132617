"""Reads the one weights file in an archive into memory."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mezzo.files import ArchiveEntry, FileError, read_entry

FORMATS = (".pdparams", ".safetensors", ".pt", ".pth")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
_PREFERRED = ("model.pdparams", "model.safetensors")


def is_archive(path: Path) -> bool:
    """Return whether the name is that of an archive; the content cannot tell, as a `.pt` file is a zip file."""
    return path.name.lower().endswith(ARCHIVES)


def read_weights_entry(path: Path) -> tuple[str, bytes]:
    """Return name and content of the weights file in an archive.

    Raises:
        FileError: The archive is refused, holds no weights file, or several and no single `model.pdparams`.
    """

    def choose(entries: list[ArchiveEntry]) -> ArchiveEntry:
        found = [entry for entry in entries if _is_weights(entry)]
        for name in _PREFERRED:
            same = [entry for entry in found if PurePosixPath(entry.name).name == name]
            if len(same) == 1:
                return same[0]
        if len(found) == 1:
            return found[0]
        if found:
            raise FileError(f"{path}: holds several weights files: {_some(found)}; unpack it and give one of them")
        there = _some([entry for entry in entries if not entry.is_folder]) or "no files"
        raise FileError(f"{path}: holds no weights file ({', '.join(FORMATS)}), only {there}")

    return read_entry(path, choose)


def _is_weights(entry: ArchiveEntry) -> bool:
    path = PurePosixPath(entry.name)
    is_hidden = path.name.startswith(".")  # macOS adds ._model.pdparams
    return entry.trouble is None and not entry.is_folder and not is_hidden and path.suffix.lower() in FORMATS


def _some(entries: list[ArchiveEntry], most: int = 8) -> str:
    names = [f"{entry.name!r} ({entry.trouble})" if entry.trouble else repr(entry.name) for entry in entries]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
