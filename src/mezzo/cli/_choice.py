"""Option values with a fixed set of names, checked before any work starts."""

from mezzo.errors import unknown_choice

_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "fp16": "float16", "bf16": "bfloat16"}


def check_dtype(came: str) -> str:
    """Return the full name of a half dtype, or raise ValueError that names the option and the nearest name."""
    if came not in _DTYPES:
        raise ValueError(unknown_choice("--dtype", came, tuple(_DTYPES)))
    return _DTYPES[came]
