"""How a function of torch is wrapped for the whole process.

Why: torch has no hook at these places. Each patch has a file of its own, which says why; this one
says how. The caller passes a function `around`, which gets the original and returns what takes its
place.
Releases: independent of torch.
Without it: nothing is patched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gets a function, returns the one that is called instead of it."""

_wrapped: set[tuple[int, str, Around]] = set()


def wrap_attribute(owner: Any, name: str, around: Around, *, static: bool = False) -> None:
    """Replace `owner.name` by `around(owner.name)`.

    A second call with the same arguments does nothing.

    Args:
        owner: A class or a module; it lives as long as the process.
        name: The function's name in it.
        around: Makes the replacement, which gets the name and the docstring of the original.
        static: The function is a static method.
    """
    key = (id(owner), name, around)
    if key in _wrapped:
        return
    _wrapped.add(key)
    original = getattr(owner, name)
    replacement = functools.wraps(original)(around(original))
    setattr(owner, name, staticmethod(replacement) if static else replacement)
