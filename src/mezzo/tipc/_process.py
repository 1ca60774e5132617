"""One command run to its end: output into a log, a time limit, and nothing left behind."""

import glob
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mezzo.tipc._plan import PlanStep

_MARK = "MEZZO_TIPC_STEP"  # in the environment of every process of a step, wherever it hides
_GRACE = 5.0  # seconds between asking and killing


def environment(step: PlanStep) -> dict[str, str]:
    """Return the whole environment of a step: ours, with what it sets and without what it removes."""
    merged = {**os.environ, **{name: value for name, value in step.env.items() if value is not None}}
    return {name: value for name, value in merged.items() if step.env.get(name, "") is not None}


def training_logs(step: PlanStep, folder: Path) -> list[Path] | None:
    """Return the logs by which a script judges a training; None where it looks at the exit status."""
    if not step.judged_by:
        return None
    found = sorted(glob.glob(step.judged_by, root_dir=folder)) if "*" in step.judged_by else [step.judged_by]
    return [folder / name for name in found]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # None: killed by us
    seconds: float
    stopped: str = ""  # why we ended it
    left_behind: int = 0  # processes that outlived it and were ended
    log_error: str = ""


def run_command(
    command: str,
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path | None,
    head: str = "",
    limit: float | None = None,
    stop: Callable[[], str] = lambda: "",
    echo: IO[bytes] | None = None,
    owner: str = "",
) -> Ended:
    """Run a command text by bash in a session of its own.

    Args:
        command: The text.
        env: Its whole environment.
        cwd: Where it runs.
        log: Its output goes there, through us; None: to our own output.
        head: What the log begins with.
        limit: Seconds.
        stop: Asked many times a second; a text ends the command.
        echo: Gets the output as well.
        owner: Whose command it is; `end_all_of` finds what a killed owner has left.

    """
    token = f"{owner}:{uuid.uuid4().hex}"
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        env={**env, _MARK: token},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=None if log is None else subprocess.PIPE,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,
    )
    pump = _Pump(process.stdout, log, head, echo) if log is not None and process.stdout is not None else None
    stopped = ""
    try:
        while process.poll() is None:
            if limit is not None and time.monotonic() - start > limit:
                stopped = f"longer than {limit:g} s"
            stopped = stopped or stop()
            if stopped:
                break
            time.sleep(0.02)
    finally:
        code = process.poll()
        if code is None:
            _end(process, token)
        left = _sweep(token)
        log_error = pump.finish() if pump is not None else ""
    return Ended(code, time.monotonic() - start, stopped, 0 if stopped else left, log_error)


class _Pump(threading.Thread):
    """Copies output into the log; goes on reading where the log cannot be written, so that the command does not hang."""

    def __init__(self, source: IO[bytes], log: Path, head: str, echo: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        self.source, self.echo, self.error = source, echo, ""
        self.target: IO[bytes] | None = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self.target = log.open("wb", buffering=0)
            self.target.write(head.encode(errors="surrogateescape"))
        except OSError as error:
            self.error = error.strerror or str(error)
        self.start()

    def run(self) -> None:
        """Copy until the last writer has closed the pipe."""
        while chunk := os.read(self.source.fileno(), 1 << 16):
            try:
                if self.target is not None and not self.error:
                    self.target.write(chunk)
            except OSError as error:
                self.error = error.strerror or str(error)
            try:
                if self.echo is not None:
                    self.echo.write(chunk)
                    self.echo.flush()
            except (OSError, ValueError):
                self.echo = None  # nobody listens any more; the command goes on

    def finish(self) -> str:
        """Wait for the rest and return what went wrong with the log."""
        self.join(_GRACE)
        if self.target is not None:
            self.target.close()
        if not self.is_alive():
            self.source.close()
        return self.error


def _end(process: "subprocess.Popen[bytes]", token: str) -> None:
    """Ask all processes of the step to end, then kill what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in {process.pid, *marked(token)}:
            _signal(pid, number, group=pid == process.pid)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            if process.poll() is not None and not marked(token):
                return
            time.sleep(0.05)


def _sweep(token: str) -> int:
    """Kill what a command left running; returns how many there were."""
    left = marked(token)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    return len(left)


def end_all_of(owner: str) -> int:
    """Kill what commands of an owner have left running, as after its own end by SIGKILL; returns how many there were."""
    return _sweep(f"{owner}:")


def _signal(pid: int, number: signal.Signals, group: bool = False) -> None:
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has just ended, or is not ours


def marked(token: str) -> list[int]:
    """Return the processes whose environment bears a token, or its beginning; none where systems hide environments."""
    word = f"{_MARK}={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "environ").read_bytes() and b") Z " not in (folder / "stat").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # not ours, or gone
    return found
