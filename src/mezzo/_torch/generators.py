"""A generator function that runs inside a context, but waits outside of it.

Why: `@auto_cast(...)` on a generator function must not leave the region open while the generator is
suspended. torch does this for `@torch.no_grad()`; the public `contextlib.ContextDecorator` does
not.
Releases: 2.11 to 2.15.
Without it: the caller of a decorated generator computes under its policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.utils._contextlib import _wrap_generator

# From torch 2.15 on it takes the name of the context too.
_TAKES_NAME = "ctx_name" in inspect.signature(_wrap_generator).parameters


def generator_in_context(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a generator function that runs inside `context()`, and waits outside of it."""
    name = ("auto_cast",) if _TAKES_NAME else ()
    wrapped: Callable[..., Any] = _wrap_generator(context, function, *name)
    return wrapped
