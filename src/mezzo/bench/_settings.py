"""What the settings and tables of benchmarks share."""

from __future__ import annotations

from typing import Any

from mezzo.errors import unknown_choice


def refuse_below_one(settings: Any, *names: str) -> None:
    """Raise ValueError, naming the option, for a setting below 1; None is none."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def chosen(option: str, asked: tuple[str, ...] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was asked for, everything that is known if nothing was; raise ValueError for an unknown name."""
    for name in asked or ():
        if name not in known:
            raise ValueError(unknown_choice(option, name, known))
    return known if asked is None else asked


def ratio(value: float | None) -> str:
    """Return a quotient as tables show it."""
    return "-" if value is None else f"{value:.2f}"
