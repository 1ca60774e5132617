"""Locks between processes: one to wait for, and one that says who works in a folder."""

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
from mezzo.files._write import explained

LOCK = ".mezzo.lock"
SIGN_OF_LIFE_S = 30.0
"""How often the owner of a folder touches its lock."""
STALE_AFTER_S = 300.0
"""A lock of another host that was not touched for so long is taken over."""


_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _let_go_in_child() -> None:
    """Close a parent's locks in a forked child: a worker that outlives a killed training must not keep its folder."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)  # the parent keeps the lock: it ends with the last descriptor
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class FolderInUse(MezzoError):
    """Another process works in the folder."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds a lock, and hold it; the system releases it when a process dies."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")  # not "w": where somebody put a link, the file behind it keeps its content
    with file:
        with explained(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def folder_lock(
    folder: Path, *, purpose: str, advice: str, force: bool = False, force_by: str | None = None
) -> Iterator[str | None]:
    """Hold the lock of a folder, `.mezzo.lock`, which names the owner's process, host and start; it is removed at the end.

    The system's own lock (`flock`) decides: it ends with its process, whatever killed it. Some network file systems keep
    such locks per host; for those, a lock file that another host wrote counts too until it is five minutes old. The owner
    touches it every 30 seconds.

    Args:
        folder: Made if it is not there, and removed at the end if it was made here and is empty.
        purpose: What the owner does, as in "a training".
        advice: Completes the refusal: what to do instead.
        force: Take the lock over from another host at once. A living process on this host is refused all the same.
        force_by: How a user asks for `force`, for the refusal; None: there is no way.

    Yields:
        One line about a lock that was taken over; None if there was none.

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
        with explained(path):
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
    with explained(path):
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
    """Whether the file that is locked still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove(descriptor: int, path: Path, *, with_folder: bool) -> None:
    """Remove a lock while it is held: who waits for it finds that the name is gone, and begins again."""
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
    except OSError:  # a file system without locks: the content of the file is all there is
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
        return f"{folder}: {described} ended without a goodbye; its lock is taken over"
    silent_s = abs(time.time() - path.stat().st_mtime)  # hosts have clocks of their own, and some are wrong by years
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
    """Return what a lock file says of its owner; empty for a lock that was released, or one that says nothing."""
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
        with suppress(OSError):  # a full or vanished disk is for those to report who write results
            os.utime(descriptor)


def is_alive(pid: object) -> bool:
    """Return whether there is a process of this number on this machine."""
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and belongs to another user
        return True
    return True
