"""Which lines of the call stack are the user's: for warnings, and for what a recording shows."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

# Whose lines are not the user's: torch, the parts of mezzo that run below a user's call, and Python's own library.
_PARTS = ("amp", "optim", "record", "static", "trial", "proof", "bench", "cli")
_MACHINERY = (
    f"{Path(torch.__file__).parent}/",
    *(f"{Path(__file__).parents[1]}/{part}/" for part in _PARTS),
    f"{Path(__file__).parents[1]}/precision.py",
    "<frozen ",
    "<string>",
    "<eval_with_key>",  # what torch builds at run time
)
_TRIAL = f"{Path(__file__).parents[1]}/trial/_trial.py"
_STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"


@cache
def is_machinery(file: str) -> bool:
    """Whether a file is torch's, Python's own, or of the parts of mezzo that run below a user's call."""
    is_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return is_library or file.startswith(_MACHINERY)


def level_of_user() -> int:
    """Return the `stacklevel` of the user's line, for a call of `warnings.warn` in the function that calls this one."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and (
        is_machinery(frame.f_code.co_filename) or frame.f_globals.get("__name__", "").startswith("mezzo.")
    ):
        frame, level = frame.f_back, level + 1
    return level


def users_line() -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor of mezzo's machinery; else nothing."""
    return next(iter(users_lines(1)), "")


def users_lines(limit: int) -> list[str]:
    """Return `file:line` of frames that are neither torch's nor of mezzo's machinery, the innermost first."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < limit:
        name = frame.f_code.co_filename
        if name == _TRIAL:  # what called the doctor is not where an operator stands
            break
        if not is_machinery(name):
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return lines
