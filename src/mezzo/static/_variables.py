"""Variables: symbolic values with which a program is written.

A call of a module, a torch function, a method or an operator on a variable is recorded in the
variable's program instead of being computed. It is tried on fake tensors without memory, which
gives the shape of its result.
"""

from __future__ import annotations

import difflib
import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from mezzo._torch.module_calls import CALL_CODE, replace_call
from mezzo._torch.pytree import tree_any, tree_leaves, tree_map
from mezzo.dtypes import dtype_name
from mezzo.errors import MezzoError

if TYPE_CHECKING:
    from mezzo.static._program import Program

TRIALS = (1009, 1021)
"""Two sizes to try for free dimensions: sizes that differ between trials depend on the batch."""


class ProgramError(MezzoError):
    """A program was written or fed in the wrong way."""


class UnknownSize(int):
    """A size that depends on the batch: it shows as -1, and computing with it is an error."""

    def __new__(cls) -> UnknownSize:
        return super().__new__(cls, -1)

    def _refuse(self, *_: Any) -> Any:
        raise ProgramError(
            "a size that depends on the batch is not known while the program is written: compute with it inside a module "
            "or function that the program calls"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __float__ = _refuse


class InputSpec:
    """Shape, dtype and name of an input; None or -1 is a size that depends on the batch.

    >>> InputSpec([None, 8], "float32", "x")
    InputSpec(shape=(-1, 8), dtype=float32, name='x')
    """

    def __init__(
        self, shape: Sequence[int | None], dtype: str | torch.dtype = "float32", name: str | None = None
    ) -> None:
        self.shape = tuple(-1 if size is None else size for size in shape)
        if not all(isinstance(size, int) and size >= -1 for size in self.shape):
            raise ValueError(
                f"shape={list(shape)}: sizes are whole numbers; use -1 or None for sizes that depend on the batch"
            )
        self.dtype, self.name = parse_dtype(dtype), name

    def __repr__(self) -> str:
        return f"InputSpec(shape={self.shape}, dtype={dtype_name(self.dtype)}, name={self.name!r})"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of a shape can be fed."""
        return len(shape) == len(self.shape) and all(
            want in (-1, size) for want, size in zip(self.shape, shape, strict=True)
        )


def parse_dtype(dtype: Any) -> torch.dtype:
    """Return a torch dtype from one, or from its name."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        names = sorted({dtype_name(d) for d in vars(torch).values() if isinstance(d, torch.dtype)})
        close = difflib.get_close_matches(str(dtype), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"dtype={dtype!r}: must be a dtype of torch or its name{hint}")
    return found


class Variable:
    """A symbolic value of a program: an input, or the result of a call.

    Torch functions, modules, tensor methods and operators accept it; the call is recorded in its
    program.
    """

    def __init__(
        self, program: Program, node: Node, trials: tuple[Tensor, ...], name: str, spec: InputSpec | None = None
    ) -> None:
        self._program, self._node, self._trials, self._spec = program, node, trials, spec
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; -1 for those that depend on the batch."""
        first, second = (trial.shape for trial in self._trials)
        return tuple(size if size == other else UnknownSize() for size, other in zip(first, second, strict=True))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one size of it; -1 if it depends on the batch."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype without mixed precision; the policy decides later, when the program is captured."""
        return self._trials[0].dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._trials[0].dim()

    def __repr__(self) -> str:
        return f"Variable({self.name!r}, shape={list(self.shape)}, dtype={dtype_name(self.dtype)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return record(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None) if not name.startswith("_") else None
        if not callable(method):
            raise AttributeError(
                f"a Variable has no attribute {name!r}: it has the methods of a tensor, shape and dtype"
            )
        if name in _NEED_NUMBERS:
            raise _no_numbers(f".{name}()")
        return functools.partial(_call_method, name, self)

    def __bool__(self) -> bool:
        raise _no_numbers("a condition")

    def __float__(self) -> float:
        raise _no_numbers("float()")

    def __int__(self) -> int:
        raise _no_numbers("int()")

    def __iter__(self) -> Iterator[Any]:
        raise _no_numbers("a loop over it")

    def __len__(self) -> int:
        raise _no_numbers("len()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _no_numbers("numpy")

    __hash__ = object.__hash__


_NEED_NUMBERS = ("item", "tolist", "numpy", "backward", "cpu", "cuda", "to_sparse", "data_ptr")


def _no_numbers(what: str) -> ProgramError:
    return ProgramError(
        f"{what} needs numbers, and a Variable has none while the program is written: fetch it with Executor.run, or do this "
        "inside a module or function that the program calls"
    )


def _call_method(name: str, *args: Any, **kwargs: Any) -> Any:
    return record(name, args, kwargs)


def _operator_method(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Variable, *others: Any) -> Any:
        return record(function, (*others, self) if swapped else (self, *others), {})

    return method


for (
    _name
) in "add sub mul truediv floordiv mod pow matmul neg pos abs invert and_ or_ xor eq ne lt le gt ge getitem".split():
    _plain = _name.rstrip("_")
    setattr(Variable, f"__{_plain}__", _operator_method(getattr(operator, _name)))
    if _plain in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
        setattr(Variable, f"__r{_plain}__", _operator_method(getattr(operator, _name), swapped=True))


def is_variable(value: Any) -> bool:
    """Whether a value is a Variable."""
    return isinstance(value, Variable)


def record(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Record a call in the program of its variables; return the variables of its results."""
    _refuse_unwatched_module()
    programs = {id(v._program): v._program for v in tree_leaves((args, kwargs)) if isinstance(v, Variable)}
    if len(programs) != 1:
        raise ProgramError("a call has variables of two programs: create all its inputs in one program")
    program = next(iter(programs.values()))
    return program.record(target, args, kwargs)


def values_of(arguments: Any, trial: int) -> Any:
    """Return arguments with variables replaced by their tensors of a trial."""
    return tree_map(lambda value: value._trials[trial] if isinstance(value, Variable) else value, arguments)


# ---------------------------------------------------------------------------------------------- calls of modules


def _call_or_record(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _watch.is_on and tree_any(is_variable, (args, kwargs)):
        return record(self, args, kwargs)
    return _watch.call(self, *args, **kwargs)


class _Watch:
    """Replaces `nn.Module.__call__` in the process while a program is written and none runs.

    Otherwise it restores the original, because Dynamo can trace only that one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a thread that ends may call `change` while this thread holds the lock
        self._writers = self._runs = 0
        self.is_on = False
        self.call: Callable[..., Any] = nn.Module.__call__
        """The original `nn.Module.__call__`."""

    def change(self, *, writers: int = 0, runs: int = 0) -> None:
        with self._lock:
            self._writers += writers
            self._runs += runs
            self.is_on = self._writers > 0 and not self._runs
            is_ours = nn.Module.__call__ is _call_or_record
            if self.is_on and not is_ours:
                self.call = replace_call(_call_or_record)
            elif not self.is_on and is_ours:
                replace_call(self.call)


_watch = _Watch()


class _Writing:
    """Marks that a program is being written, until `end` is called or this object is deleted.

    The end of a thread deletes its object.
    """

    def __init__(self) -> None:
        _watch.change(writers=1)
        self.end = weakref.finalize(self, _watch.change, writers=-1)
        self.end.atexit = False


class _ThreadState(threading.local):
    guards = 0
    writing: _Writing | None = None


_thread_state = _ThreadState()


@contextmanager
def writing_inside() -> Iterator[None]:
    """Make modules check for variables inside the `with` block, which may raise."""
    _thread_state.guards += 1
    writing = _Writing()
    try:
        yield
    finally:
        writing.end()
        _thread_state.guards -= 1


def begin_writing() -> None:
    """Make modules check for variables until this thread calls `end_writing`, or ends."""
    if _thread_state.writing is None:
        _thread_state.writing = _Writing()


def begin_writing_without_guard() -> None:
    """Call `begin_writing`, unless the thread is inside a `program_guard`, which does the same."""
    if not _thread_state.guards:
        begin_writing()


def end_writing() -> None:
    """Undo `begin_writing` in this thread; a `program_guard` ends by itself."""
    if _thread_state.writing is not None:
        _thread_state.writing.end()
        _thread_state.writing = None


@contextmanager
def modules_unwatched() -> Iterator[None]:
    """Inside, `nn.Module.__call__` is the original in every thread.

    Nothing is recorded, and Dynamo can trace modules.
    """
    _watch.change(runs=1)
    try:
        yield
    finally:
        _watch.change(runs=-1)


def _refuse_unwatched_module() -> None:
    """Raise ProgramError if a module that does not check for variables was called with one.

    Otherwise each operator of the module would be recorded, not the module.
    """
    frame = sys._getframe(1)
    while frame is not None and not _watch.is_on:
        if frame.f_code is CALL_CODE:
            kind = type(frame.f_locals.get("self")).__name__
            raise ProgramError(
                f"{kind} is called with a variable while no program is written here: call it inside "
                "`with program_guard(program):` or after enable_static(), and not while another thread runs a program"
            )
        frame = frame.f_back  # type: ignore[assignment]
