"""The folder of a data set: use the data that are there, or fill it completely from a source or a generator."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo.fetch import check_request, download
from mezzo.files import Bounds, FileError, MiB, locked, read_json, report_write_errors, unpack, write_text
from mezzo.tipc._datasets import DataSet
from mezzo.tipc._inputs import DataInput
from mezzo.vision.data import DataError
from mezzo.vision.lite import LITE_MARKER as GENERATED
from mezzo.vision.lite import prepare as generate

SOURCE_MARKER = ".mezzo-source.json"
"""A file in folders that `prepare` has made from a real set; it names the source."""

WHOLE_TRAIN = "whole_train"
_HOW = "pass --data DIR with the set, or --url URL --sha256 SUM of an archive of it"
_OTHER_SET = DataSet(name="a set that is not made here", kind="", generator="", forms=((),))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """Where a real set comes from: a folder, or an archive behind a URL with its checksum."""

    data: Path | None = None
    url: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.data is not None and self.url is not None:
            raise DataError("both --data and --url: give one of them")
        if self.url is None and self.sha256 is not None:
            raise DataError("--sha256 without --url: it is the checksum of an archive that is fetched")
        if self.data is not None and not self.data.is_dir():
            raise DataError(f"--data {self.data}: no such folder")
        if self.url is not None:
            check_request(self.url, self.sha256)

    @property
    def is_given(self) -> bool:
        """Whether there is a folder or an archive."""
        return self.data is not None or self.url is not None

    def described(self) -> dict[str, str]:
        """Return the content of the marker."""
        if self.data is not None:
            return {"data": str(self.data.resolve())}
        return {"url": str(self.url), "sha256": str(self.sha256).lower()}


@dataclass(slots=True)
class PreparationLog:
    """Collects what a preparation makes, and its notices."""

    report: Callable[[str], None]
    folders: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def notice(self, line: str) -> None:
        """Keep a notice, and report it."""
        self.notices.append(line)
        self.report(line)


def path_inside(root: Path, name: str) -> Path:
    """Return a path that may be written; links are followed.

    Raises:
        DataError: It leads out of the repository.
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{name}: lies outside of {root}, where nothing is written; put it in place yourself")
    return path


def fill_data_folder(
    needed: DataInput, mode: str, root: Path, source: DataSource, log: PreparationLog, bounds: Bounds
) -> None:
    """Make the data that commands need, unless they are there.

    Raises:
        DataError: The data are missing and cannot be made, or another set is in the way.
        FileError: The archive is refused.
        RunError: Something cannot be fetched or written.
    """
    if needed.dataset is not None:
        _DataFolder(needed, needed.dataset, root, source, log, bounds).fill(mode)
        return
    missing = needed.first_missing(root)
    if source.is_given or missing is not None:
        why = f"{missing} is missing, and " if missing is not None else ""
        raise DataError(
            f"{needed.folder} ({needed.source}): {why}data of its type are not made here; put them in place"
        )
    _DataFolder(needed, _OTHER_SET, root, source, log, bounds).fill(mode)


class _DataFolder:
    def __init__(
        self, needed: DataInput, dataset: DataSet, root: Path, source: DataSource, log: PreparationLog, bounds: Bounds
    ) -> None:
        self._needed, self._dataset, self._source, self._log, self._bounds = needed, dataset, source, log, bounds
        self._root, self._folder, self._name = root, root / needed.folder, needed.folder
        self._unfinished = self._folder.with_name(f".{self._folder.name}.unfinished")

    def fill(self, mode: str) -> None:
        """Make the set unless it is there; other processes wait."""
        if self._is_foreign() and not self._source.is_given and self._needed.first_missing(self._root) is None:
            self._log.notice(f"{self._name}: the set that is there is used")  # its folder may be read-only
            return
        if path_inside(self._root, self._name).resolve() == self._root.resolve():
            raise DataError(f"{self._name} ({self._needed.source}): is the repository itself; name a folder in it")
        with report_write_errors(self._folder.parent):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._folder.with_name(f".{self._folder.name}.lock")):
                shutil.rmtree(self._unfinished, ignore_errors=True)  # left by a run that was killed
                try:
                    self._fill(mode)
                finally:
                    shutil.rmtree(self._unfinished, ignore_errors=True)

    def _is_foreign(self) -> bool:
        """Whether the folder has content that `prepare` did not make."""
        is_empty = self._folder.is_dir() and not any(self._folder.iterdir())
        is_ours = (self._folder / GENERATED).is_file() or _read_marker(self._folder / SOURCE_MARKER) is not None
        return os.path.lexists(self._folder) and not is_empty and not is_ours

    def _fill(self, mode: str) -> None:
        is_generated = (self._folder / GENERATED).is_file()
        is_whole = self._folder.is_dir() and self._needed.first_missing(self._root) is None
        if self._is_foreign():
            self._refuse(is_whole)
        if self._source.is_given:
            if _read_marker(self._folder / SOURCE_MARKER) != self._source.described() or not is_whole:
                self._take_source()
            self._log.notice(f"{self._name}: {self._dataset.name} of {self._source.data or self._source.url}")
            return
        if mode.startswith(WHOLE_TRAIN) and (is_generated or not is_whole):
            there = "generated data" if is_generated else "no such set"
            raise DataError(f"{mode} needs the whole of {self._dataset.name}, in {self._name} there is {there}; {_HOW}")
        if not is_whole:
            self._generate()
            is_generated = True
        if is_generated:
            self._log.notice(
                f"{self._name}: generated data in the form of {self._dataset.name}: good to see that everything runs, "
                f"not how well it learns; for the real set {_HOW}"
            )
        else:
            self._log.notice(f"{self._name}: the set that is there is used")

    def _refuse(self, is_whole: bool) -> None:
        """Raise DataError if the content of the folder cannot be used, or would have to be removed."""
        if not is_whole:
            missing = self._needed.first_missing(self._root)
            raise DataError(
                f"{self._name}: was not made by this command, and is no {self._dataset.name}: no {missing}; move it away"
            )
        data = self._source.data
        if self._source.is_given and not (data and data.resolve() == self._folder.resolve()):
            raise DataError(f"{self._name}: holds a set that was not made by this command; move it away")

    def _generate(self) -> None:
        self._log.report(f"{self._name}: drawing data in the form of {self._dataset.name}")
        fresh = generate(self._dataset.generator, self._unfinished / "set", **self._dataset.options)
        if (missing := self._needed.first_missing(self._root, fresh)) is not None:
            raise DataError(
                f"{missing}: named by {self._needed.source}, not there, and not a file of the data that can be drawn; "
                "put the set in place yourself"
            )
        self._put(fresh)

    def _take_source(self) -> None:
        """Put the real set in place: links to its entries, or the content of its archive."""
        data = self._source.data
        if data is not None and data.resolve() == self._folder.resolve():
            return  # already in place
        fresh = self._link(data) if data is not None else self._fetch()
        self._dataset.complete(fresh)
        write_text(fresh / SOURCE_MARKER, json.dumps(self._source.described(), indent=1) + "\n")
        self._put(fresh)

    def _link(self, data: Path) -> Path:
        if missing := self._needed.first_missing(self._root, data):
            raise DataError(f"--data {data}: {self._unlike(missing)}")
        fresh = self._unfinished / "set"
        fresh.mkdir(parents=True)
        for entry in data.resolve().iterdir():
            if not entry.name.startswith("."):  # markers are not part of the set
                (fresh / entry.name).symlink_to(entry)
        return fresh

    def _fetch(self) -> Path:
        url, archive = str(self._source.url), self._unfinished / "archive"
        fresh = self._unfinished / "unpacked"
        fresh.mkdir(parents=True)
        self._log.report(f"{self._name}: fetching {url}")
        download(url, str(self._source.sha256), archive, self._bounds)
        self._log.report(f"{self._name}: the checksum is right, unpacking")
        unpack(archive, fresh, self._bounds)
        inner = [fresh, *sorted(path for depth in ("*/", "*/*/") for path in fresh.glob(depth))]
        found = next((path for path in inner if self._needed.first_missing(self._root, path) is None), None)
        if found is None:
            raise DataError(f"{url}: {self._unlike(f'{self._needed.first_missing(self._root, fresh)} in it')}")
        return found

    def _unlike(self, missing: str) -> str:
        files = ", ".join(self._needed.lists) or self._dataset.describe_files()
        return f"does not look like {self._dataset.name}: no {missing}; {self._needed.source} needs {files}"

    def _put(self, fresh: Path) -> None:
        """Rename a finished set to its place; the old content was made by `prepare`, or is an empty folder."""
        if os.path.lexists(self._folder):
            self._folder.rename(self._unfinished / "old")
        fresh.rename(self._folder)
        self._log.folders.append(self._folder)


def _read_marker(path: Path) -> Any:
    """Return the content of a marker; None if it cannot be read: then `prepare` has not made the folder."""
    try:
        return read_json(path, limit=MiB)
    except FileError:
        return None
