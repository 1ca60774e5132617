"""Runs readers on hostile input: each input has a number, runs under limits of memory and time, and may only fail cleanly.

A clean failure is a `MezzoError` of one line without control characters. Everything else is a defect: another exception, a
crash, a hang, too much memory. `tests/fuzz/run.py` does this for as long as one likes, `test_fuzz.py` for seconds.
"""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mezzo.errors import MezzoError

Make = Callable[[random.Random, Path], Path]
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """A reader, and how to make input for it.

    Args:
        name: As in 'pdparams'.
        make: Writes an input into an empty folder and returns its path. All chance comes from the generator given.
        read: Reads it: returns anything, or raises MezzoError.
        seconds: Longest time of one read.
        megabytes: Most memory that one read may take beyond what the process has.
    """

    name: str
    make: Make
    read: Read
    seconds: float = 5.0
    megabytes: int = 1024


@dataclass
class Result:
    """What became of a target's inputs."""

    target: str
    tried: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    defects: list[str] = field(default_factory=list)


class Overdue(BaseException):
    """A read took too long; no reader catches this."""


def generator(target: Target, number: int) -> random.Random:
    """Return the source of chance of an input: the same for the same number."""
    return random.Random(f"{target.name}:{number}")


def try_input(target: Target, number: int) -> tuple[str, str, float]:
    """Return 'accepted', 'refused' or 'defect', the reason, and the seconds that reading took."""
    folder = Path(tempfile.mkdtemp(prefix="mezzo-fuzz-"))
    try:
        try:
            path = target.make(generator(target, number), folder)
        except Exception as error:  # noqa: BLE001  a generator that fails is a defect of the tests
            return "defect", f"the generator raised {type(error).__name__}: {error}"[:500], 0.0
        return judge(target, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(target: Target, path: Path) -> tuple[str, str, float]:
    """Read one file under the limits; see `try_input`."""
    started = time.perf_counter()
    try:
        with alarm(target.seconds), memory(target.megabytes):
            target.read(path)
        outcome, reason = "accepted", ""
    except MezzoError as error:
        text = str(error)
        outcome, reason = ("refused", text) if is_clean(text) else ("defect", f"an unclean message: {text[:200]!r}")
    except Overdue:
        outcome, reason = "defect", f"took more than {target.seconds} s"
    except MemoryError:
        outcome, reason = "defect", f"took more than {target.megabytes} MiB"
    except BaseException as error:  # noqa: BLE001  every other exception is a defect
        outcome, reason = "defect", "".join(traceback.format_exception(error)[-3:])[-1500:]
    return outcome, reason, time.perf_counter() - started


def is_clean(message: str) -> bool:
    """Return whether a message is lines of printable text; RecipeError has one line per fault."""
    return all(line.isprintable() for line in message.split("\n"))


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(signum: int, frame: object) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory(megabytes: int) -> Iterator[None]:
    """Limit the address space to what is in use and some more: an allocation beyond that is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(target: Target, *, seconds: float | None = None, count: int | None = None, first: int = 0) -> Result:
    """Try inputs in child processes until the time or the count is used up; a crash or a hang costs one child."""
    result = Result(target.name)
    end = None if seconds is None else time.monotonic() + seconds
    number = first
    while (end is None or time.monotonic() < end) and (count is None or number < first + count):
        left = None if end is None else end - time.monotonic()
        number = _run_child(target, number, None if count is None else first + count, left, result)
    return result


_RECORD = struct.Struct("<qqqqd")  # next number, tried, accepted, refused, slowest


def _run_child(target: Target, first: int, last: int | None, seconds: float | None, result: Result) -> int:
    """Try inputs in one child; return the number to go on with."""
    shared = mmap.mmap(-1, 4096)
    shared[: _RECORD.size] = _RECORD.pack(first, 0, 0, 0, 0.0)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        receiver.close()
        try:
            _child(target, first, last, seconds, shared, sender)
        finally:
            os._exit(1)  # the child must never return into the tests of its parent
    sender.close()
    seen, since, status = first, time.monotonic(), None
    reason = ""
    while status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = code
            break
        while receiver.poll(0):
            try:
                result.defects.append(receiver.recv())
            except EOFError:
                break
        number = _RECORD.unpack_from(shared)[0]
        if number != seen:
            seen, since = number, time.monotonic()
        elif time.monotonic() - since > 2 * target.seconds + 20:  # stuck in C, where no alarm reaches
            os.kill(pid, signal.SIGKILL)
            reason = "hung outside of Python"
        time.sleep(0.02)
    while receiver.poll(0):
        try:
            result.defects.append(receiver.recv())
        except EOFError:
            break
    number, tried, accepted, refused, slowest = _RECORD.unpack_from(shared)
    result.tried += tried
    result.accepted += accepted
    result.refused += refused
    result.slowest_s = max(result.slowest_s, slowest)
    if status != 0:
        what = reason or f"the process died ({os.waitstatus_to_exitcode(status)})"
        result.defects.append(f"{target.name} {number}: {what}")
        result.tried += 1
        number += 1
    return number


def _child(
    target: Target, first: int, last: int | None, seconds: float | None, shared: mmap.mmap, sender: object
) -> None:
    """Try inputs and note the progress where the parent sees it; never returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # a crash is reported by the parent
    end = None if seconds is None else time.monotonic() + seconds
    number, tried, accepted, refused, slowest, defects = first, 0, 0, 0, 0.0, 0
    while (last is None or number < last) and (end is None or time.monotonic() < end) and defects < 20:
        outcome, reason, took = try_input(target, number)
        tried, slowest = tried + 1, max(slowest, took)
        accepted, refused = accepted + (outcome == "accepted"), refused + (outcome == "refused")
        if outcome == "defect":
            defects += 1
            sender.send(f"{target.name} {number}: {reason}")  # type: ignore[attr-defined]
        number += 1
        shared[: _RECORD.size] = _RECORD.pack(number, tried, accepted, refused, slowest)
    os._exit(0)
