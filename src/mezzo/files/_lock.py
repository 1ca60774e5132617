"""Locks between processes: a blocking lock, and a lock file that names the owner of a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError
from mezzo.files._errors import FileError
from mezzo.files._json import read_json
from mezzo.files._plain import plain
from mezzo.files._read import is_regular
from mezzo.files._write import report_write_errors

LOCK = ".mezzo.lock"
SIGN_OF_LIFE_S = 30.0
"""Interval at which the owner of a folder touches its lock."""
STALE_AFTER_S = 300.0
"""A lock of another host that was not touched for this long is taken over."""


_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_in_child() -> None:
    """Close the locks of the parent in a forked child: a worker that survives its training must not keep the lock."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)  # the parent keeps the lock, which ends with the last descriptor
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class FolderInUse(MezzoError):
    """Another process works in the folder."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Acquire a lock, waiting for other processes; the system releases it when a process dies."""
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")  # not "w": it would empty the target of a link
    with file:
        with report_write_errors(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def folder_lock(
    folder: Path, *, purpose: str, advice: str, force: bool = False, force_by: str | None = None
) -> Iterator[str | None]:
    """Hold the lock file of a folder, `.mezzo.lock`, which names the owner's process, host and start time.

    The system's file lock (`flock`) decides; it ends with its process. Some network file systems keep such locks per
    host. Therefore a lock file written by another host also counts, until it is five minutes old; its owner touches it
    every 30 seconds. The file is removed at the end.

    Args:
        folder: Created if missing; then also removed at the end if it is empty.
        purpose: What the owner does, as in "a training".
        advice: End of the error message: what to do instead.
        force: Take over the lock of another host at once. A running process on this host is never overridden.
        force_by: The option that sets `force`, for the error message; None: there is none.

    Yields:
        A message about a lock that was taken over, or None.

    Raises:
        FolderInUse: Another process holds it.
        RunError: The system refuses to write.
    """
    path, is_new = folder / LOCK, not folder.exists()
    descriptor = _open(path)
    try:
        owner = _owner(path)
        _take(descriptor, folder, owner, purpose, advice)
        while not _is_ours(descriptor, path):  # its last owner removed it a moment ago
            _close(descriptor)
            descriptor = _open(path)
            owner = _owner(path)
            _take(descriptor, folder, owner, purpose, advice)
        notice = _check_host(path, folder, owner, purpose, advice, force=force, force_by=force_by)
        with report_write_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _content(purpose), 0)
        stop = threading.Event()
        threading.Thread(target=_touch, args=(descriptor, stop), name="mezzo-lock", daemon=True).start()
        try:
            yield notice
        finally:
            stop.set()
            if descriptor in _held:  # not in a forked child that unwinds
                _remove(descriptor, path, with_folder=is_new)
    finally:
        _close(descriptor)


def _open(path: Path) -> int:
    if path.is_symlink() or (path.exists() and not is_regular(path)):
        raise FolderInUse(f"{path}: is not a lock that mezzo wrote; look at it and delete it")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    with report_write_errors(path):
        for tries_left in reversed(range(100)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o644)
                break
            except (FileNotFoundError, FileExistsError):  # the last owner removed the empty folder a moment ago
                if not tries_left:
                    raise
    _held.add(descriptor)
    return descriptor


def _is_ours(descriptor: int, path: Path) -> bool:
    """Return whether the locked file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove(descriptor: int, path: Path, *, with_folder: bool) -> None:
    """Remove a lock file while holding it: processes that wait for it notice this and start again."""
    with suppress(OSError):  # the folder may be gone
        if _is_ours(descriptor, path):
            path.unlink()
            if with_folder:
                path.parent.rmdir()  # if nothing was put into it


def _close(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _take(descriptor: int, folder: Path, owner: dict[str, Any], purpose: str, advice: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FolderInUse(f"{folder}: {_described(owner, purpose)} works here; {advice}") from error
    except OSError:  # a file system without locks: only the content of the file can tell
        if owner.get("host") == socket.gethostname() and is_alive(owner.get("pid")):
            raise FolderInUse(f"{folder}: {_described(owner, purpose)} works here; {advice}") from None


def _check_host(
    path: Path, folder: Path, owner: dict[str, Any], purpose: str, advice: str, *, force: bool, force_by: str | None
) -> str | None:
    """Return a line about the lock that is taken over; raise if another host may still hold it."""
    if not owner:
        return None
    described = _described(owner, purpose)
    if owner.get("host") == socket.gethostname():
        return f"{folder}: {described} did not end properly; its lock is taken over"
    silent_s = abs(time.time() - path.stat().st_mtime)  # clocks of hosts differ
    if force:
        return f"{folder}: the lock of {described} is taken over, as asked for"
    if silent_s < STALE_AFTER_S:
        hint = f", or add {force_by} if you know that it is dead" if force_by else ""
        raise FolderInUse(
            f"{folder}: {described} gave a sign of life {silent_s:.0f} s ago; {advice}; a dead one is taken over after "
            f"{STALE_AFTER_S:.0f} s{hint}"
        )
    return f"{folder}: the lock of {described} is taken over: no sign of life for {silent_s:.0f} s"


def _owner(path: Path) -> dict[str, Any]:
    """Return the owner recorded in a lock file; empty if it is released or unreadable."""
    try:
        content = read_json(path, limit=1 << 16)
    except FileError:
        return {}
    return content if isinstance(content, dict) else {}


def _described(owner: dict[str, Any], purpose: str) -> str:
    if not owner:
        return f"another process ({purpose})"
    what, pid, host, since = (plain(str(owner.get(key, "?")))[:100] for key in ("purpose", "pid", "host", "since"))
    return f"{what} (process {pid} on {host}, since {since})"


def _content(purpose: str) -> bytes:
    owner = {
        "purpose": purpose,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
        "command": " ".join(sys.argv)[:1000],
    }
    return json.dumps(owner).encode()


def _touch(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(SIGN_OF_LIFE_S):
        with suppress(OSError):  # those who write results report a full or missing disk
            os.utime(descriptor)


def is_alive(pid: object) -> bool:
    """Return whether a process with this number runs on this machine."""
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, and belongs to another user
        return True
    return True
