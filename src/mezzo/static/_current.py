"""The current programs of a thread, and the functions that write into them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from mezzo.static._program import Program, Training
from mezzo.static._region import CastRules
from mezzo.static._variables import Variable, begin_writing, end_writing, writing_inside


@dataclass(slots=True)
class _Pair:
    main: Program = field(default_factory=Program)
    startup: Program = field(default_factory=Program)


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack = [_Pair()]
        self.is_static = False


_current = _Current()


def default_main_program() -> Program:
    """Return the program that calls are written into: that of the innermost `program_guard`, or the thread's own."""
    return _current.stack[-1].main


def default_startup_program() -> Program:
    """Return the program that goes with it; modules make their weights themselves, so it has nothing to do."""
    return _current.stack[-1].startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Write what follows into another program.

    Modules look for variables only inside (`nn.Module.__call__` is replaced for that), unless static mode is enabled.
    """
    _current.stack.append(_Pair(main_program, startup_program or Program()))
    try:
        with writing_inside():
            yield
    finally:
        _current.stack.pop()


def enable_static() -> None:
    """Say that programs are written from here on: modules look for variables until `disable_static`.

    `data` does not need it: outside of `program_guard` it begins the same.
    """
    _current.is_static = True
    begin_writing()


def disable_static() -> None:
    """Say that this thread writes no more calls: its modules do not look for variables any more."""
    _current.is_static = False
    end_writing()


def in_static_mode() -> bool:
    """Whether `enable_static` is in force in this thread."""
    return _current.is_static


def data(name: str, shape: Sequence[int | None], dtype: str | torch.dtype = "float32") -> Variable:
    """Return an input of the current program; it is fed by its name, and cast to this dtype.

    Args:
        name: Any string; no other variable of the program may have it.
        shape: Sizes; None or -1 where each batch brings its own.
        dtype: Of torch, or its name.
    """
    return default_main_program().data(name, shape, dtype)


def minimize(optimizer: Optimizer, loss: Variable, max_norm: float | None = None) -> None:
    """Close the program of a loss: from now on a run is a training step, in float32.

    `mezzo.static.amp.decorate(optimizer, ...).minimize(loss)` is the same in mixed precision.

    Args:
        optimizer: Of torch, with parameters of the program.
        loss: One number.
        max_norm: Clip the norm of the gradients to this.
    """
    check_minimize(optimizer, loss)
    loss._program.close(Training(loss, optimizer, max_norm=max_norm), CastRules())


def check_minimize(optimizer: Any, loss: Any) -> None:
    """Raise TypeError for what is no optimizer, or no variable."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"minimize: {type(optimizer).__name__} is no torch.optim.Optimizer")
    if not isinstance(loss, Variable):
        raise TypeError(
            f"minimize: the loss is a {type(loss).__name__}, not a variable of a program; call the model on mezzo.static.data"
        )
