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
    """Return the program of the innermost `program_guard`, or else that of the thread."""
    return _current.stack[-1].main


def default_startup_program() -> Program:
    """Return the startup program, which does nothing: modules initialise their own weights."""
    return _current.stack[-1].startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record the calls of the `with` block in another program.

    `nn.Module.__call__` is replaced in the block, so that modules check for variables.
    """
    _current.stack.append(_Pair(main_program, startup_program or Program()))
    try:
        with writing_inside():
            yield
    finally:
        _current.stack.pop()


def enable_static() -> None:
    """Begin static mode: modules check for variables until `disable_static`.

    `data` outside `program_guard` does the same.
    """
    _current.is_static = True
    begin_writing()


def disable_static() -> None:
    """End static mode of this thread: modules no longer check for variables."""
    _current.is_static = False
    end_writing()


def in_static_mode() -> bool:
    """Whether static mode is on in this thread."""
    return _current.is_static


def data(name: str, shape: Sequence[int | None], dtype: str | torch.dtype = "float32") -> Variable:
    """Return an input of the current program; values are fed by name and cast to `dtype`.

    Args:
        name: Any string; no other variable of the program may have it.
        shape: Sizes; None or -1 for sizes that depend on the batch.
        dtype: A torch dtype, or its name.
    """
    return default_main_program().data(name, shape, dtype)


def minimize(optimizer: Optimizer, loss: Variable, max_norm: float | None = None) -> None:
    """Close the program of a loss: from now on a run is a training step, in float32.

    `mezzo.static.amp.decorate(optimizer, ...).minimize(loss)` is the same in mixed precision.

    Args:
        optimizer: A torch optimizer of the program's parameters.
        loss: One number.
        max_norm: Clip the norm of the gradients to this.
    """
    check_minimize(optimizer, loss)
    loss._program.close(Training(loss, optimizer, max_norm=max_norm), CastRules())


def check_minimize(optimizer: Any, loss: Any) -> None:
    """Raise TypeError unless they are a torch.optim.Optimizer and a Variable."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"minimize: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if not isinstance(loss, Variable):
        raise TypeError(
            f"minimize: the loss is a {type(loss).__name__}, not a variable of a program; call the model on mezzo.static.data"
        )
