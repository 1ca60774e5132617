"""Logs the numbers of a run by step, into a file of JSON lines and as TensorBoard events."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mezzo.errors import MezzoError, RunError
from mezzo.files import MiB, parse_json, read_bytes, report_write_errors, say, short_repr, write_file
from mezzo.model.callbacks import EventWriter
from mezzo.vision.train._wandb import WandbLog

SCALARS = "scalars.jsonl"
EVENTS = "tensorboard"
ScalarPoint = dict[str, Any]
"""`step`, an int, and the numbers logged at this step: floats by name."""
_MOST_BYTES = 4096 * MiB
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # not in JSON


class ScalarLogError(MezzoError):
    """A file of scalars cannot be read, or has nothing to show."""


class ScalarLog:
    """Logs numbers by step into `scalars.jsonl` and, if installed, TensorBoard. A context manager.

    Args:
        directory: Folder of the run; it is created.
        resume_at: The next step of the run, 0 for a new run. Points of this step and later are
            dropped, so that each step is logged once. None keeps all points.
        with_tensorboard: False writes no events.
        wandb: Gets the same numbers; closed with this log.
        notice: Called with a line if TensorBoard is not installed or cannot write.
    """

    def __init__(
        self,
        directory: Path,
        *,
        resume_at: int | None = None,
        with_tensorboard: bool = True,
        wandb: WandbLog | None = None,
        notice: Callable[[str], object] = say,
    ) -> None:
        self.path = Path(directory) / SCALARS
        with report_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_from(self.path, resume_at)
            if self.path.is_symlink():
                self.path.unlink()  # a copied folder may hold a link to any file
            self._file = self.path.open("ab", buffering=0)  # unbuffered: close() has nothing left to write
        self._events = _event_writer(self.path.parent / EVENTS, resume_at, notice) if with_tensorboard else None
        self._wandb = wandb

    def add(self, step: int, **values: float) -> None:
        """Log numbers of a step; a kill after this call does not lose them.

        Raises:
            ValueError: The step is not an integer of at least 0, or the log is closed.
            RunError: The file cannot be written, or was removed. Failures of TensorBoard are only
                notices, because the file has the same numbers.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r}: must be a whole number, 0 or more")
        if self._file.closed:
            raise ValueError(f"{self.path}: is closed; call add() before close()")
        numbers = {name: float(value) for name, value in values.items()}
        with report_write_errors(self.path):
            left = memoryview(_line({"step": step, **numbers}).encode())
            while left:  # a nearly full disk may accept only a part
                left = left[self._file.write(left) :]
            is_removed = os.fstat(self._file.fileno()).st_nlink == 0
        if is_removed:
            raise RunError(
                f"{self.path}: was removed while the run writes to it; if a checkpoint is left, continue from it with "
                "--resume auto"
            )
        if self._events is not None:
            for name, number in numbers.items():
                self._events.add(name, number, step)
        if self._wandb is not None:
            self._wandb.add(step, numbers)

    def read(self) -> list[ScalarPoint]:
        """Return all points of the file, in order."""
        return read_scalars(self.path)

    @staticmethod
    def read_file(directory: Path) -> list[ScalarPoint]:
        """Return the points of a run's directory, without opening its log for writing.

        See `read_scalars`.
        """
        return read_scalars(Path(directory) / SCALARS)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was logged yet."""
        return not self.path.exists() or self.path.stat().st_size == 0

    def close(self) -> None:
        """Close both files; later calls have no effect."""
        self._file.close()
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def __enter__(self) -> ScalarLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_scalars(path: Path) -> list[ScalarPoint]:
    """Return the points of a `scalars.jsonl`; an incomplete last line, left by a kill, is ignored.

    Raises:
        ScalarLogError: The file cannot be read, or another line is wrong; the message names file
            and line.
    """
    try:
        text = read_bytes(path, limit=_MOST_BYTES, raising=ScalarLogError).decode("utf-8", "replace")
    except ScalarLogError as error:
        raise ScalarLogError(f"{error}; give the file of a run") from error
    *lines, _cut = text.split("\n")
    return [_point(line, path, number) for number, line in enumerate(lines, start=1)]


def _point(line: str, path: Path, number: int) -> ScalarPoint:
    try:
        content = parse_json(line)
        step, values = content["step"], {name: _value(x) for name, x in content.items() if name != "step"}
        if type(step) is not int or step < 0:
            raise ValueError("a point has a step")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScalarLogError(
            f"{path}:{number}: {short_repr(line, 40)} is not a logged point; delete this line"
        ) from error
    return {"step": step, **values}


def _value(value: Any) -> float:
    if isinstance(value, str):
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("a value is a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("a value is a float") from error


def _line(point: ScalarPoint) -> str:
    return json.dumps({name: x if math.isfinite(x) else str(x) for name, x in point.items()}) + "\n"


def _drop_from(path: Path, step: int | None) -> None:
    """Atomically remove from a file the points of `step` and later, and an incomplete last line."""
    if not path.exists():
        return
    kept = [point for point in read_scalars(path) if step is None or point["step"] < step]
    content = "".join(map(_line, kept)).encode()
    if content != path.read_bytes():
        write_file(path, content)


def _event_writer(directory: Path, resume_at: int | None, notice: Callable[[str], object]) -> EventWriter | None:
    """Return TensorBoard's writer; None, after a notice, if it is not installed."""
    try:
        return EventWriter(directory, resume_at, notice)
    except ImportError:
        notice(f"TensorBoard is not installed: scalars go only to {SCALARS} (pip install 'mezzo[vision]')")
        return None
