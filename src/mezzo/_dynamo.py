"""Marks functions that torch.compile must leave alone. Imports nothing of Dynamo, costs nothing outside of it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def hide_from_dynamo(advice: str) -> Callable[[F], F]:
    """Return a decorator for a function that Dynamo neither traces nor compiles: a graph break, or an error with advice."""

    def hide(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = advice  # type: ignore[attr-defined]
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
        return function

    return hide
