"""Option values with a fixed set of names, checked before any work starts."""

from mezzo.dtypes import HALF_SPELLINGS
from mezzo.errors import unknown_choice


def check_dtype(came: str) -> str:
    """Return the full name of a half dtype, or raise ValueError that names the option and the nearest name."""
    if came not in HALF_SPELLINGS:
        raise ValueError(unknown_choice("--dtype", came, tuple(HALF_SPELLINGS)))
    return HALF_SPELLINGS[came]
