"""The high-level API: `Model`, its callbacks and metrics, and what it shares with the training command."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.model._model import Model

__all__ = ["Model"]


def __getattr__(name: str) -> Any:
    """Load `Model` when it is asked for: metrics and callbacks do not need it."""
    if name == "Model":
        from mezzo.model._model import Model

        return Model
    raise AttributeError(f"module 'mezzo.model' has no attribute {name!r}")
