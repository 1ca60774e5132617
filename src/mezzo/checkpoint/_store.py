"""The checkpoints of a run: folders in a directory, each there whole or not at all, each with a manifest of its files.

What happens when the process is killed, step by step: a folder is filled under `.tmp-NAME-PID`, listed, flushed to the
disk, and only then gets its name. An older one of that name is moved to `.old-NAME-PID` first and deleted last. So at
every moment the old or the new one is there, whole; `clean` puts back an `.old-` one whose successor did not arrive.
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
    """The checkpoints of one run. One process writes; `save` is for one thread.

    Args:
        directory: Where they lie; made when the first one is saved.
        keep: How many `iter_N` stay when `prune` is called; 0 keeps all.
    """

    def __init__(self, directory: Path, keep: int = 5) -> None:
        if keep < 0:
            raise ValueError(f"keep={keep}: must be 0 (keep all checkpoints) or more")
        self.directory = Path(directory)
        self.keep = keep

    # Writing

    def save(self, name: str, write: Callable[[Path], None]) -> Path:
        """Make a checkpoint, in place of an older one of that name; return its folder.

        Args:
            name: `iter_500`, `best_model`, ...
            write: Fills the empty folder that it is given. If it raises, nothing has changed.

        Raises:
            CheckpointError: The name is none for a checkpoint, or a file has it.
            RunError: The system refuses to write.
        """
        target = self._target(name)
        part, old = self._aside("tmp", name), self._aside("old", name)
        with report_write_errors(target):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._put_back(name)  # where clean() was not called, the moved one may be the only one
            for leftover in (part, old):
                _delete(leftover)
            part.mkdir()
        try:
            write(part)
            with report_write_errors(target):
                write_manifest(part)
                flush_tree(part)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # the reason is on its way; a leftover is removed by clean()
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
            os.rename(old, part)  # half deleted, it must not be taken for one to put back
            _delete(part)

    def _put_back(self, name: str) -> None:
        found = self._find(name)
        if found is not None and found.name != name:
            os.rename(found, self.directory / name)
            flush(self.directory)

    def save_latest(self, name: str) -> None:
        """Note that a checkpoint is the newest one.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        target = self._target(name)
        if not target.is_dir():
            raise CheckpointError(f"{target}: is not there; save it before it is called the latest")
        write_text(self.directory / LATEST, f"{name}\n")

    def prune(self, *, up_to: int | None = None) -> list[str]:
        """Delete all but the newest `keep` of the `iter_N`; return the names of those deleted.

        `best_model` and what else has another name stays, and so does the one that `latest` names.

        Args:
            up_to: Later ones are not of this run: they neither count nor go.
        """
        names = [name for name in self.iterations() if up_to is None or int(name.removeprefix("iter_")) <= up_to]
        latest = self._latest_name()
        surplus = [name for name in (names[: -self.keep] if self.keep else []) if name != latest]
        for name in surplus:
            target, part = self.directory / name, self._aside("tmp", name)
            with report_write_errors(target):
                _delete(part)
                os.rename(target, part)  # gone at once; a half-deleted folder must not keep the name
                _delete(part)
        return surplus

    def clean(self) -> None:
        """Remove what killed runs left behind, and put back what they had moved away; to call when a run starts.

        What belongs to another living process is left alone.
        """
        for path, kind, name, pid in list(self._leftovers()):
            with report_write_errors(path):
                if kind == "old" and not (self.directory / name).exists():
                    self._put_back(name)
                elif pid == os.getpid() or not is_alive(pid):
                    _delete(path)

    # Reading

    def iterations(self) -> list[str]:
        """Return the names of the `iter_N`, oldest first."""
        found = [(int(match[1]), path.name) for path in self._entries() if (match := _ITERATION.fullmatch(path.name))]
        return [name for _, name in sorted(found) if (self.directory / name).is_dir()]

    def latest(self) -> Path | None:
        """Return the folder of the newest whole checkpoint; None if there is none.

        That is the one that the file `latest` names; without the file, the `iter_N` of the highest number.

        Raises:
            CheckpointError: `latest` names one that is gone, or is no such file.
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
        """Return the `iter_N` to resume from, best first, and a line if the file `latest` is of no use.

        The first is the one that `latest` names, then come older ones, newest first. Later ones come last: they belong
        to a run that was given up.
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
            path: The folder of a checkpoint, or a file in it; the name of one of this run; or the directory of a run, which
                stands for its latest. None: the latest of this run, if there is one.

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
            raise CheckpointError(f"{path}: holds {name[:40]!r}, which is no name of a checkpoint; delete this file")
        return name

    def _find(self, name: str) -> Path | None:
        """Return a checkpoint by name, also one that a killed run had just moved away."""
        if (self.directory / name).is_dir():
            return self.directory / name
        moved = [path for path, kind, of, _ in self._leftovers() if (kind, of) == ("old", name)]
        return moved[0] if moved else None

    def _target(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or name == LATEST:
            raise CheckpointError(
                f"{name!r} is no name for a checkpoint; use letters, digits, '_', '-', '.', as in iter_500 (latest is taken)"
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
