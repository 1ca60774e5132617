"""Python kernels put on a dispatch key, replaced and taken out again.

Why: `torch.library.Library` is public, but nothing public takes its kernels out; mezzo does when
kernels are uninstalled.
Releases: 2.11 to 2.15. Some refuse to replace a kernel of another Python library unless
`allow_override` is given; the others do not know that argument.
Without it: kernels stay until the process ends, and a second library on the same key is an error.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

_TAKES_OVERRIDE = "allow_override" in inspect.signature(torch.library.Library.impl).parameters

OVERRIDE: dict[str, Any] = {"allow_override": True} if _TAKES_OVERRIDE else {}
"""Arguments of `Library.impl` that let it replace a kernel."""


def remove_kernels(library: torch.library.Library) -> None:
    """Take every kernel of a library out; what was there before comes back."""
    library._destroy()
