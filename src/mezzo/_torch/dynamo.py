"""Dynamo, the tracer of `torch.compile`: hidden functions, errors, callbacks, running without it.

Why: mezzo's regions, kernels and steps must not be traced; caches on disk must know the policy;
errors of a capture are explained. Most of this must work without loading Dynamo, which takes
seconds: `DYNAMO in sys.modules` asks for that.
Releases: 2.11 to 2.15. A release without the callback handler keeps its cache keys as they are.
Without it: compiled functions contain half of a region, or fail with an error inside mezzo.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch

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


def dynamo_errors() -> Any:
    """Return the module with Dynamo's exceptions. Loads Dynamo."""
    return torch._dynamo.exc


def is_frame_of_compiled_call(frame: FrameType) -> bool:
    """Whether a frame is that of Dynamo's wrapper around a compiled function."""
    return frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def uncompiled(module: Any) -> Any:
    """Return the module inside of a `torch.compile(module)`; None for one that is not compiled."""
    return getattr(module, "_orig_mod", None)
