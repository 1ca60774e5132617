"""The compiled tier of the kernels: optional, built once by `mezzo build`, used from then on.

Without it every call of an operator with a kernel of mezzo goes through Python, which takes 2 to 5 microseconds. With
it only calls that need a cast do.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from mezzo.errors import RunError

_SOURCE = Path(__file__).with_name("compiled_kernels.cpp")
_NAME = "mezzo_kernels"
#: Run in another process, so that a failed or interrupted build leaves this one intact.
_BUILD = (
    "import sys; from torch.utils.cpp_extension import load; "
    "load(name=sys.argv[1], sources=[sys.argv[2]], build_directory=sys.argv[3], extra_cflags=['-O2'], "
    "is_python_module=False)"
)


class _CompiledTier:
    library: Any = None
    """The loaded library; None if it was not built, or not looked for yet."""


COMPILED = _CompiledTier()
"""The compiled kernels of this process."""


def library_path() -> Path:
    """Return the path of the library for this source, torch and Python; it may not exist yet."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(cache_home) if cache_home else Path.home() / ".cache"
    version = f"{torch.__version__} {sys.version} {sys.platform}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    return cache / "mezzo" / f"{_NAME}-{digest}.so"


def build_kernels() -> Path:
    """Compile the kernels for this torch and Python unless that was done; return the path of the library.

    Needs a C++ compiler and takes half a minute. Processes that start afterwards use the library, unless
    `MEZZO_COMPILED=0` is set.

    Raises:
        RunError: There is no compiler, or it failed.
    """
    path = library_path()
    if path.exists():
        return path
    for tool in ("ninja", *shlex.split(os.environ.get("CXX", "c++"))[:1]):
        if shutil.which(tool) is None and not (tool == "ninja" and importlib.util.find_spec("ninja")):
            raise RunError(f"building the kernels needs {tool}, which is not installed; mezzo works without them")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{path.parent}: cannot be made: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from error
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-c", _BUILD, _NAME, str(_SOURCE), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
            raise RunError(
                f"the compiler failed: {lines[0] if lines else 'no message'}; mezzo works without the kernels"
            )
        os.replace(Path(folder) / f"{_NAME}.so", path)  # atomic
    return path


def load_kernels() -> Any:
    """Return the library as a module; None if it was not built, or if `MEZZO_COMPILED=0` is set."""
    if os.environ.get("MEZZO_COMPILED") == "0":
        return None
    path = library_path()
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        warnings.warn(
            f"the compiled kernels cannot be loaded ({error}): delete {path} and run 'mezzo build'", stacklevel=2
        )
        return None
    return module
