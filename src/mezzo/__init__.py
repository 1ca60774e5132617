"""Mixed-precision training on PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from mezzo._version import version_of
from mezzo.errors import MezzoError

if TYPE_CHECKING:
    from mezzo import amp, static
    from mezzo.model import Model, callbacks, metric
    from mezzo.precision import Precision

__all__ = ["Precision", "MezzoError", "Model", "amp", "callbacks", "metric", "static", "__version__"]

_HOMES = {"Precision": "mezzo.precision", "Model": "mezzo.model"}

__version__: str = version_of() or "0+sources"
"""The installed version; `0+sources` if mezzo runs from its sources without being installed."""


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `import mezzo.amp` must not load a training engine."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("callbacks", "metric"):
        return importlib.import_module(f"mezzo.model.{name}")
    if name in __all__:
        return importlib.import_module(f"mezzo.{name}")
    raise AttributeError(f"module 'mezzo' has no attribute {name!r}")
