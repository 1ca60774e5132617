"""Mixed-precision training on PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.train import Model, callbacks

__all__ = ["Model", "callbacks"]

_HOMES = {"Model": ("mezzo.train", "Model"), "callbacks": ("mezzo.train.callbacks", None)}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for: `import mezzo.amp` must not load a training engine."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mezzo' has no attribute {name!r}")
    module, member = _HOMES[name]
    loaded = importlib.import_module(module)
    return loaded if member is None else getattr(loaded, member)
