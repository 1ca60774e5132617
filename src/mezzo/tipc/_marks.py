"""Find and end processes by a mark in their environment; as a program, wait for the end of a worker and clean up after it.

Every process of a step inherits the mark, also in another session. This file imports the standard library only: as a
program it starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

STEP_MARK = "MEZZO_TIPC_STEP"
"""The variable that every process of a step has: the run's folder and a token of the step."""
WORKER_MARK = "MEZZO_TIPC_WORKER"
"""The variable that every process has which a worker of a cluster started."""
_PROC = Path("/proc")
_IS_KERNEL = 0x00200000  # the flag of the kernel's own threads, which have no environment
_LOOKS_AGAIN = (0.0, 0.002, 0.02)  # a process that is just starting a program shows an empty environment for a moment
_CLEAN_UP_S = 5.0  # a process that forks while it is killed may need several looks


def marked(beginning: str, variable: str = STEP_MARK) -> list[int]:
    """Return the processes whose mark has this beginning; none if the system hides environments."""
    word = f"{variable}={beginning}".encode()
    found = []
    folders = list(_PROC.glob("[0-9]*"))
    for pause in _LOOKS_AGAIN:
        time.sleep(pause)
        unclear = []
        for folder in folders:
            try:
                environment, status = (folder / "environ").read_bytes(), (folder / "stat").read_bytes()
            except OSError:
                continue  # of another user, or ended
            fields = status.rpartition(b")")[2].split()  # state, parent, group, session, terminal, its group, flags...
            if fields[0] == b"Z" or int(fields[6]) & _IS_KERNEL:
                continue
            if word in environment:
                found.append(int(folder.name))
            elif not environment:
                unclear.append(folder)
        folders = unclear
        if not folders:
            break
    return found


def send_signal(pid: int, number: signal.Signals, group: bool = False) -> None:
    """Send a signal to a process, or to its group; a process that has just ended is no error."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended, or belongs to another user


def kill_marked(beginning: str, variable: str = STEP_MARK) -> int:
    """Kill the processes whose mark has this beginning; return their number."""
    left = marked(beginning, variable)
    for pid in left:
        send_signal(pid, signal.SIGKILL)
    return len(left)


def guard_this_process() -> None:
    """Start a watcher: if this process is killed, the watcher kills every process that was started from here.

    A cluster may kill its workers at any time, and the processes of a step are in sessions of their own. Called again,
    it does nothing.
    """
    if _guarded:
        return
    token = uuid.uuid4().hex
    # This process holds the only writing end of the pipe, so the watcher reads its end when this process ends.
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", __file__, token]
    with subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True):
        os.close(read)
    _guarded.append(write)
    os.environ[WORKER_MARK] = token


_guarded: list[int] = []


def _watch(token: str) -> None:
    """Wait for the end of standard input, then kill every process with the token of the worker."""
    if os.fork():
        return  # the watcher is no child of the worker: some clusters kill the children of a worker that ends
    while os.read(0, 1):
        pass
    deadline = time.monotonic() + _CLEAN_UP_S
    while kill_marked(token, WORKER_MARK) and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    _watch(sys.argv[1])
