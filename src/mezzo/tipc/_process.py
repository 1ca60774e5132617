"""Run one command: its output goes to a log, its time is limited, and no process is left."""

import glob
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mezzo.tipc._load import LoadSampler
from mezzo.tipc._marks import STEP_MARK, kill_marked, marked, send_signal
from mezzo.tipc._plan import PlanStep

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
MAX_LOG_BYTES = 1 << 30
"""Output of a command beyond this is not logged, except its end: a loop that prints must not fill the disk."""
TAIL_BYTES = 4 << 20
"""The end that is logged of a longer output."""


def environment(step: PlanStep, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a step: `base`, or this process's own, with the changes of the step."""
    own = os.environ if base is None else base
    merged = {**own, **{name: value for name, value in step.env.items() if value is not None}}
    return {name: value for name, value in merged.items() if step.env.get(name, "") is not None}


def training_logs(step: PlanStep, folder: Path) -> list[Path] | None:
    """Return the logs by which a script judges a training; None if it uses the exit status."""
    if not step.judged_by:
        return None
    found = sorted(glob.glob(step.judged_by, root_dir=folder)) if "*" in step.judged_by else [step.judged_by]
    return [folder / name for name in found]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # None: the runner killed it
    seconds: float
    stopped: str = ""  # why the runner ended it
    left_behind: int = 0  # processes that were still running and were ended
    log_error: str = ""
    load: Mapping[str, str] = field(default_factory=dict)  # how busy the machine was, see `LoadSampler`


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
    """Run a command by bash in its own session.

    Args:
        command: The command.
        env: Its complete environment.
        cwd: Its directory.
        log: The file for its output; None: the output of this process.
        head: The first lines of the log.
        limit: Time limit in seconds.
        stop: Called many times per second; a non-empty text ends the command.
        echo: A second destination of the output.
        owner: A name by which `end_all_of` finds processes after the runner was killed.

    """
    token = f"{owner}:{uuid.uuid4().hex}"
    start = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        env={**env, STEP_MARK: token},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=None if log is None else subprocess.PIPE,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,
    )
    pump = _Pump(process.stdout, log, head, echo) if log is not None and process.stdout is not None else None
    sampler = LoadSampler(lambda: marked(token))
    stopped = ""
    try:
        while process.poll() is None:
            if limit is not None and time.monotonic() - start > limit:
                stopped = f"longer than {limit:g} s"
            stopped = stopped or stop()
            if stopped:
                break
            sampler.sample()
            time.sleep(0.02)
    finally:
        code = process.poll()
        if code is None:
            _end(process, token)
        left = kill_marked(token)
        log_error = pump.finish() if pump is not None else ""
    return Ended(code, time.monotonic() - start, stopped, 0 if stopped else left, log_error, sampler.load)


class _Pump(threading.Thread):
    """Copies output to the log. It reads on if the log cannot be written, so that the command does not block."""

    def __init__(self, source: IO[bytes], log: Path, head: str, echo: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        self.source, self.echo, self.error = source, echo, ""
        self.target: IO[bytes] | None = None
        self.size, self.tail, self.num_left_out = 0, bytearray(), 0
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self.target = log.open("wb", buffering=0)
            self.target.write(head.encode(errors="surrogateescape"))
        except OSError as error:
            self.error = error.strerror or str(error)
        self.start()

    def run(self) -> None:
        """Copy until all writers have closed the pipe."""
        while chunk := os.read(self.source.fileno(), 1 << 16):
            room = max(0, MAX_LOG_BYTES - self.size)
            self.size += len(chunk)
            self._write(chunk[:room])
            self._keep_tail(chunk[room:], 2 * TAIL_BYTES)
            try:
                if self.echo is not None:
                    self.echo.write(chunk)
                    self.echo.flush()
            except (OSError, ValueError):
                self.echo = None  # the reader has gone; the command continues

        self._keep_tail(b"", TAIL_BYTES)
        if self.num_left_out:
            self._write(f"\n[... {self.num_left_out} bytes are left out here ...]\n".encode())
        self._write(bytes(self.tail))

    def _write(self, data: bytes) -> None:
        """Write to the log; keep the first error."""
        try:
            if data and self.target is not None and not self.error:
                self.target.write(data)
        except OSError as error:
            self.error = error.strerror or str(error)
        except ValueError:  # `finish` has waited long enough and closed the log
            self.error = "closed before the end of the output"

    def _keep_tail(self, data: bytes, limit: int) -> None:
        """Add to the end of a long output; if it is longer than the limit, keep only the last `TAIL_BYTES`."""
        self.tail += data
        if len(self.tail) > limit:
            cut = len(self.tail) - TAIL_BYTES
            self.num_left_out += cut
            del self.tail[:cut]

    def finish(self) -> str:
        """Wait for the rest of the output; return the error of the log, empty if there is none."""
        self.join(_GRACE)
        if self.target is not None:
            self.target.close()
        if not self.is_alive():
            self.source.close()
        return self.error


def _end(process: "subprocess.Popen[bytes]", token: str) -> None:
    """Send SIGTERM to all processes of the step, then SIGKILL to those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in {process.pid, *marked(token)}:
            send_signal(pid, number, group=pid == process.pid)
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            if process.poll() is not None and not marked(token):
                return
            time.sleep(0.05)


def end_all_of(owner: str) -> int:
    """Kill the processes that an owner left running when it was killed itself; return their number."""
    return kill_marked(f"{owner}:")
