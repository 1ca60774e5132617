"""The checkpoints of a run: folders that are saved atomically, each with a manifest of its files.

A folder is written as `.tmp-NAME-PID`, listed in its manifest, flushed to the disk, and then renamed. An older
checkpoint of that name is first moved to `.old-NAME-PID` and deleted last. So a killed process always leaves the old or
the new checkpoint complete; `clean` restores an `.old-` folder whose successor is missing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import overload

from mezzo.checkpoint._errors import CheckpointError
from mezzo.files import MiB, flush, flush_tree, is_alive, read_bytes, report_write_errors, write_manifest, write_text

LATEST = "latest"
_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)", re.ASCII)
_ITERATION = re.compile(r"iter_(\d+)", re.ASCII)
_NAME = re.compile(r"[\w][\w.+-]{0,99}", re.ASCII)


class CheckpointStore:
    """The checkpoints of one run. Only one process and thread may save.

    Args:
        directory: Folder of the checkpoints; created when the first one is saved.
        keep: Number of `iter_N` that `prune` keeps; 0 keeps all.
    """

    def __init__(self, directory: Path, keep: int = 5) -> None:
        if keep < 0:
            raise ValueError(f"keep={keep}: must be 0 (keep all checkpoints) or more")
        self.directory = Path(directory)
        self.keep = keep

    # Writing

    def save(self, name: str, write: Callable[[Path], None]) -> Path:
        """Save a checkpoint, replacing an older one of that name; return its folder.

        Args:
            name: `iter_500`, `best_model`, ...
            write: Called with an empty folder to fill. If it raises, nothing changes.

        Raises:
            CheckpointError: The name is not allowed, or is that of a file.
            RunError: Writing failed.
        """
        target = self._target(name)
        part, old = self._aside("tmp", name), self._aside("old", name)
        with report_write_errors(target):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._restore(name)  # without clean(), the moved folder may be the only one
            for leftover in (part, old):
                _delete(leftover)
            part.mkdir()
        try:
            write(part)
            with report_write_errors(target):
                write_manifest(part)
                flush_tree(part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # the error is raised below; clean() removes leftovers
            raise
        with report_write_errors(target):
            self._put_in_place(part, target, old)
        return target

    def _put_in_place(self, part: Path, target: Path, old: Path) -> None:
        if target.exists():
            os.rename(target, old)
        os.rename(part, target)
        flush(self.directory)
        if old.exists():
            os.rename(old, part)  # a half-deleted folder must not be restored
            _delete(part)

    def _restore(self, name: str) -> None:
        found = self._find(name)
        if found is not None and found.name != name:
            os.rename(found, self.directory / name)
            flush(self.directory)

    def save_latest(self, name: str) -> None:
        """Record that a checkpoint is the newest one.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        target = self._target(name)
        if not target.is_dir():
            raise CheckpointError(f"{target}: is not there; save it before it is called the latest")
        write_text(self.directory / LATEST, f"{name}\n")

    def prune(self, *, up_to: int | None = None) -> list[str]:
        """Delete all except the newest `keep` of the `iter_N`; return the deleted names.

        Checkpoints with other names, such as `best_model`, and the one that `latest` names are kept.

        Args:
            up_to: Iteration of this run; later checkpoints are neither counted nor deleted.
        """
        names = [name for name in self.iterations() if up_to is None or int(name.removeprefix("iter_")) <= up_to]
        latest = self._latest_name()
        surplus = [name for name in (names[: -self.keep] if self.keep else []) if name != latest]
        for name in surplus:
            target, part = self.directory / name, self._aside("tmp", name)
            with report_write_errors(target):
                _delete(part)
                os.rename(target, part)  # atomic: a half-deleted folder must not keep the name
                _delete(part)
        return surplus

    def clean(self) -> None:
        """Remove leftovers of killed runs and restore checkpoints that they had moved; call it when a run starts.

        Folders of other running processes are not touched.
        """
        for path, kind, name, pid in list(self._leftovers()):
            with report_write_errors(path):
                if kind == "old" and not (self.directory / name).exists():
                    self._restore(name)
                elif pid == os.getpid() or not is_alive(pid):
                    _delete(path)

    # Reading

    def iterations(self) -> list[str]:
        """Return the names of the `iter_N`, oldest first."""
        found = [(int(match[1]), path.name) for path in self._entries() if (match := _ITERATION.fullmatch(path.name))]
        return [name for _, name in sorted(found) if (self.directory / name).is_dir()]

    def latest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint; None if there is none.

        The file `latest` names it; without the file, it is the `iter_N` with the highest number.

        Raises:
            CheckpointError: `latest` names a missing checkpoint, or cannot be read.
        """
        name = self._latest_name()
        if name is None:
            names = self.iterations()
            return self.directory / names[-1] if names else None
        found = self._find(name)
        if found is None:
            raise CheckpointError(
                f"{self.directory / LATEST}: names {name!r}, which is not there; delete this file to resume from the newest "
                "iter_N, or name a checkpoint"
            )
        return found

    def candidates(self) -> tuple[list[Path], str | None]:
        """Return the `iter_N` to resume from, best first, and a message if the file `latest` is unusable.

        First comes the one that `latest` names, then older ones, newest first. Later ones come last: they belong to a
        run that was abandoned.
        """
        try:
            latest, trouble = self.latest(), None
        except CheckpointError as error:
            latest, trouble = None, str(error)
        found = [self.directory / name for name in reversed(self.iterations())]
        if latest is None or not _ITERATION.fullmatch(latest.name):
            return found, trouble
        number = _number(latest)
        older = [folder for folder in found if _number(folder) < number]
        return [latest, *older, *(folder for folder in found if _number(folder) > number)], trouble

    @overload
    def resume_from(self, path: str | os.PathLike[str]) -> Path: ...

    @overload
    def resume_from(self, path: None) -> Path | None: ...

    def resume_from(self, path: str | os.PathLike[str] | None) -> Path | None:
        """Return the folder of the checkpoint to resume from; None for a new run.

        Args:
            path: The folder of a checkpoint, or a file in it; the name of a checkpoint of this run; or the folder of a run,
                for its latest. None: the latest of this run, if there is one.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        if path is None:
            return self.latest()
        given = Path(path)
        given = given.parent if given.is_file() else given
        if not given.is_dir():
            own = self._find(given.name) if str(path) == given.name else None
            if own is None:
                raise CheckpointError(f"{path}: there is no such checkpoint; {self._known()}")
            return own
        run = CheckpointStore(given)
        if not (given / LATEST).exists() and not run.iterations():
            return given
        return run.latest()

    def _known(self) -> str:
        names = [path.name for path in sorted(self._entries()) if path.is_dir() and not path.name.startswith(".")]
        return f"{self.directory} has {', '.join(names[:12])}" if names else f"{self.directory} has none"

    def _latest_name(self) -> str | None:
        path = self.directory / LATEST
        if not os.path.lexists(path):
            return None
        try:
            name = read_bytes(path, limit=MiB, raising=CheckpointError)[:200].decode("utf-8", "replace").strip()
        except CheckpointError as error:
            raise CheckpointError(f"{error}; delete it") from error
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{path}: holds {name[:40]!r}, which is not the name of a checkpoint; delete this file"
            )
        return name

    def _find(self, name: str) -> Path | None:
        """Return a checkpoint by name, including one that a killed run had moved."""
        if (self.directory / name).is_dir():
            return self.directory / name
        moved = [path for path, kind, of, _ in self._leftovers() if (kind, of) == ("old", name)]
        return moved[0] if moved else None

    def _target(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name == LATEST:
            raise CheckpointError(
                f"{name!r} is not a name for a checkpoint; use letters, digits, '_', '-', '.', as in iter_500 "
                "(latest is taken)"
            )
        target = self.directory / name
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target}: is a file; move it away, a checkpoint is a folder")
        return target

    def _aside(self, kind: str, name: str) -> Path:
        return self.directory / f".{kind}-{name}-{os.getpid()}"

    def _entries(self) -> list[Path]:
        return list(self.directory.iterdir()) if self.directory.is_dir() else []

    def _leftovers(self) -> Iterator[tuple[Path, str, str, int]]:
        for path in sorted(self._entries()):
            if match := _LEFTOVER.fullmatch(path.name):
                yield path, match[1], match[2], int(match[3])


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
