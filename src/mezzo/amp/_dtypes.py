"""The two half dtypes and the spellings in which they arrive."""

from typing import Any

import torch

HALF_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Dtypes a cast may start from. float64, integers, bools and complex numbers are never cast and never promote.
CASTABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Names of a half dtype, in lower case.
SPELLINGS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", **{name: name for name in HALF_DTYPES}}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the bare name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def parse_half_dtype(dtype: Any) -> torch.dtype:
    """Return the half dtype named by a string (any case, `fp16`/`bf16` too) or given as a torch dtype.

    >>> parse_half_dtype("BF16")
    torch.bfloat16
    """
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if isinstance(name, str):
        name = name.lower().removeprefix("torch.")
        if name in SPELLINGS:
            return HALF_DTYPES[SPELLINGS[name]]
    raise ValueError(f"dtype={dtype!r}: must be 'float16' or 'bfloat16' (or torch.float16, torch.bfloat16)")
