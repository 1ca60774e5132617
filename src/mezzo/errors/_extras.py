"""Checks of optional dependencies before any work starts."""

import importlib.util

from mezzo.errors._kinds import MezzoError

_PACKAGES = {"cv2": "opencv-python-headless", "PIL": "Pillow", "xlsxwriter": "XlsxWriter"}


class MissingExtra(MezzoError):
    """A command needs a package that is not installed."""


def require(*modules: str, extra: str) -> None:
    """Raise MissingExtra if a module is not installed.

    >>> require("json", extra="vision")
    """
    missing = [_PACKAGES.get(module, module) for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingExtra(f"this command needs {', '.join(missing)}: pip install 'mezzo[{extra}]'")
