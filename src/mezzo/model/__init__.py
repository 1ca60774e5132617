"""The high-level API: `Model`, callbacks, metrics, and code shared with the training command."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.model._model import Model
    from mezzo.model.steps import NonFiniteLoss

__all__ = ["Model", "NonFiniteLoss"]

_HOMES = {"Model": "mezzo.model._model", "NonFiniteLoss": "mezzo.model.steps"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: metrics and callbacks must not import Model."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mezzo.model' has no attribute {name!r}")
