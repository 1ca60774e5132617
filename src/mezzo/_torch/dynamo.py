"""Dynamo, the tracer of `torch.compile`: hidden functions, errors, callbacks, loggers, running without it.

Why: mezzo's regions, kernels and steps must not be traced; caches on disk must know the policy;
errors of a capture are explained; a logger or a recurrent layer must not end a capture. Most of this must
work without loading Dynamo, which takes seconds: `DYNAMO in sys.modules` asks for that.
Releases: 2.11 to 2.15. A release without the callback handler keeps its cache keys as they are.
Without it: compiled functions contain half of a region, or fail with an error inside mezzo.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch

from mezzo._torch.patches import wrap_attribute

F = TypeVar("F", bound=Callable[..., Any])

DYNAMO = "torch._dynamo"
"""Name of Dynamo's module in `sys.modules`, where it is once it is loaded."""


def hide_from_dynamo(advice: str) -> Callable[[F], F]:
    """Return a decorator for functions that Dynamo neither traces nor compiles.

    A call is a graph break, or with `fullgraph=True` an error that contains `advice`. Dynamo is not
    imported, and calls outside of it cost nothing.
    """

    def hide(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = advice  # type: ignore[attr-defined]
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
        return function

    return hide


def load_dynamo() -> None:
    """Import Dynamo."""
    importlib.import_module(DYNAMO)


def kept_out() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as eager code.

    Dynamo is not loaded for it.
    """
    return torch.compiler.set_stance("force_eager") if DYNAMO in sys.modules else nullcontext()


def call_around_compilations(start: Callable[..., None], end: Callable[..., None]) -> None:
    """Call `start` before and `end` after each compilation.

    Call this again after `torch._dynamo.reset`, which drops both.
    """
    # Another thread may be importing that module right now.
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is not None and start not in handler.start_callbacks:
        handler.register_start_callback(start)
        handler.register_end_callback(end)


def take_as_constants(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo call functions while it traces, and take what they return as constants.

    Loads Dynamo.
    """
    import torch._dynamo

    for function in functions:
        torch._dynamo.assume_constant_result(function)


class _LoggerState(threading.local):
    logs_while_tracing = False


_loggers = _LoggerState()


@contextmanager
def loggers_called_while_tracing() -> Iterator[None]:
    """Inside, Dynamo calls the methods of a `logging.Logger` while it traces, and leaves them out of the graph.

    A message that contains a tensor stops Dynamo, unless the logger drops messages of its level. Call
    `let_dynamo_call_loggers` once before.
    """
    before, _loggers.logs_while_tracing = _loggers.logs_while_tracing, True
    try:
        yield
    finally:
        _loggers.logs_while_tracing = before


def let_dynamo_call_loggers() -> None:
    """Prepare `loggers_called_while_tracing`. Loads Dynamo."""
    variables = importlib.import_module("torch._dynamo.variables.misc")
    wrap_attribute(variables.LoggingLoggerVariable, "call_method", _call_logger)


def _call_logger(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not _loggers.logs_while_tracing:
            return original(variable, tx, name, args, kwargs)
        logger: logging.Logger = variable.value
        result = None
        if not _is_silent(logger, name):
            if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
                return original(variable, tx, name, args, kwargs)
            given = {key: value.as_python_constant() for key, value in kwargs.items()}
            result = getattr(logger, name)(*(value.as_python_constant() for value in args), **given)
        return torch._dynamo.variables.ConstantVariable.create(result)

    return call_method


def _is_silent(logger: logging.Logger, name: str) -> bool:
    """Whether a method of the logger does nothing, because messages of its level are dropped."""
    level = logging.getLevelNamesMapping().get(name.removesuffix("_once").upper())
    return level is not None and not logger.isEnabledFor(level)


def recurrent_layers_traced() -> AbstractContextManager[Any]:
    """Return a context in which Dynamo traces RNN, LSTM and GRU, which it refuses by default. Loads Dynamo."""
    import torch._dynamo

    context: AbstractContextManager[Any] = torch._dynamo.config.patch(allow_rnn=True)
    return context


def dynamo_errors() -> Any:
    """Return the module with Dynamo's exceptions. Loads Dynamo."""
    return torch._dynamo.exc


def is_frame_of_compiled_call(frame: FrameType) -> bool:
    """Whether a frame is that of Dynamo's wrapper around a compiled function."""
    return frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def uncompiled(module: Any) -> Any:
    """Return the module inside of a `torch.compile(module)`; None for one that is not compiled."""
    return getattr(module, "_orig_mod", None)
