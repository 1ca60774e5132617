"""Mixed-precision training on PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo import amp, callbacks, metric, static
    from mezzo.train import Model

__all__ = ["Model", "amp", "callbacks", "metric", "static"]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `import mezzo.amp` must not load a training engine."""
    if name == "Model":
        return importlib.import_module("mezzo.train").Model
    if name in __all__:
        return importlib.import_module(f"mezzo.{name}")
    raise AttributeError(f"module 'mezzo' has no attribute {name!r}")
