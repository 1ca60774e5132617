"""Option values with a fixed set of names, checked before any work starts."""

from mezzo._errors import unknown_choice

DTYPES = ("float16", "bfloat16")


def check_dtype(came: str) -> None:
    """Raise ValueError, naming the option and the nearest name, unless `came` is a half dtype's name."""
    if came not in DTYPES:
        raise ValueError(unknown_choice("--dtype", came, DTYPES))
