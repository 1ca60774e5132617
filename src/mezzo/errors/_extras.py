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
    missing = [_PACKAGES.get(module, module) for module in modules if not _is_installed(module)]
    if missing:
        raise MissingExtra(f"this command needs {', '.join(missing)}: pip install 'mezzo[{extra}]'")


def _is_installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    if spec is None:
        return False
    is_folder = spec.origin is None and spec.submodule_search_locations is not None
    return not is_folder  # a folder without __init__.py, such as the ./wandb that wandb leaves behind
