"""`MezzoPrecision`: a precision plugin for Lightning's `Trainer` and `Fabric`.

The class is built at the first access, on the base class of the installed distribution: `lightning`, or
`pytorch_lightning` with `lightning_fabric`. If both are installed, the one that is already imported decides.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from mezzo.errors import MissingExtra
from mezzo.integrations._lightning_plugin import LightningPlugin

if TYPE_CHECKING:
    from typing import Any as MezzoPrecision

__all__ = ["MezzoPrecision"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@functools.cache
def _plugin_of(package: str) -> type:
    """Return the plugin for one distribution of Lightning."""
    lightning = importlib.import_module(package)
    base = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    names = {"__module__": __name__, "__doc__": LightningPlugin.__doc__, "_lightning": lightning}
    return type("MezzoPrecision", (LightningPlugin, base), names)


def __getattr__(name: str) -> Any:
    if name != "MezzoPrecision":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    installed = [each for each in _PACKAGES if importlib.util.find_spec(each.partition(".")[0]) is not None]
    if not installed:
        raise MissingExtra("MezzoPrecision needs lightning or pytorch_lightning: pip install 'mezzo[lightning]'")
    return _plugin_of(next((each for each in installed if each in sys.modules), installed[0]))
