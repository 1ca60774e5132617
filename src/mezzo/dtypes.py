"""The names of levels and dtypes, and the spellings that are understood.

This is the only table of them. torch is imported when a torch dtype is needed, not before: the
command line checks its options without loading torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    HALF_DTYPES: tuple[torch.dtype, ...]
    """torch.float16 and torch.bfloat16."""

LEVELS = ("O0", "OD", "O1", "O2", "O3")
"""How much runs in half precision, least first; docs/levels.md describes each."""

HALF_NAMES = ("float16", "bfloat16")

PRECISION_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The short words of `--precision` options, and the dtypes that they mean."""

HALF_SPELLINGS = {name: name for name in HALF_NAMES} | {"fp16": "float16", "bf16": "bfloat16", "half": "float16"}
"""Words that name a half dtype, in lower case."""


def __getattr__(name: str) -> Any:
    """Make `HALF_DTYPES` when it is first asked for."""
    if name != "HALF_DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    halves = globals()["HALF_DTYPES"] = (torch.float16, torch.bfloat16)
    return halves


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module.

    >>> import torch
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _level_instead(word: Any) -> str:
    """Return the level to use for a dtype that is a level in mezzo, as the end of a message."""
    name = word.lower().removeprefix("torch.") if isinstance(word, str) else ""
    if name.startswith(("fp8", "float8")):
        return "; level 'O3' computes in FP8"
    return "; level 'O0' is float32" if name in ("float32", "fp32", "float") else ""


def parse_half_dtype(dtype: Any) -> torch.dtype:
    """Return the half dtype that a torch dtype or a word means: `float16`, `fp16`, `half`, `bfloat16`, `bf16`; any case.

    Raises:
        ValueError: It means no half dtype.

    >>> parse_half_dtype("BF16")
    torch.bfloat16
    """
    import torch

    word = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    name = HALF_SPELLINGS.get(word.lower().removeprefix("torch.")) if isinstance(word, str) else None
    if name is None:
        message = f"dtype={dtype!r}: must be 'float16' or 'bfloat16' (or torch.float16, torch.bfloat16)"
        raise ValueError(message + _level_instead(word))
    half: torch.dtype = getattr(torch, name)
    return half


def parse_level(level: Any, allowed: Sequence[str] = LEVELS) -> str:
    """Return a level in upper case, or raise ValueError if it is not one of `allowed`."""
    if isinstance(level, str) and level.upper() in allowed:
        return level.upper()
    raise ValueError(f"level={level!r}: must be one of {', '.join(allowed)}")
