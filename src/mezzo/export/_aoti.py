"""AOTInductor as an engine: the program as a compiled library.

The library is executable code, so mezzo never loads it from the folder of a model, which may be
untrusted. It builds the library on this machine, in the user's cache, and names it by a hash of the
program, the torch version and the CPU's instruction set.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo._torch.inductor import compile_package, load_package
from mezzo.export._deployed import Deployed, sha256
from mezzo.export._engine import EngineOutput, Images
from mezzo.export._engine_options import EngineOptions
from mezzo.export._errors import EngineError
from mezzo.export._programs import load_program
from mezzo.export._torch_engines import use_threads


class AotiEngine:
    """The program compiled ahead of time for the CPU; built on first use, which takes a minute.

    Args:
        model: The exported model.
        options: Threads and precision.

    Raises:
        EngineError: There is no C++ compiler, a GPU was asked for, or the program cannot be
            compiled.
    """

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        if options.on_gpu:
            raise EngineError("torch-aoti works on the CPU here; for a GPU use --engine torch-graph")
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            raise EngineError("torch-aoti needs a C++ compiler: install g++ or name one in CXX")
        self._threads = options.threads or torch.get_num_threads()
        path = model.file(options.precision, "program")
        self._network: Callable[[Tensor], Any] = load_package(str(_built(path)))

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images."""
        use_threads(self._threads)
        with torch.inference_mode():
            output = self._network(torch.from_numpy(images))
        result: EngineOutput = (output[0] if isinstance(output, list | tuple) else output).numpy()
        return result


def cache_folder() -> Path:
    """Return the folder of compiled programs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mezzo" / "aoti"


def _built(program: Path) -> Path:
    """Return the package of a program; compile it at first use."""
    key = f"{sha256(program)} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    package = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.pt2"
    if not package.exists():
        package.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = package.with_name(f"{package.stem}-{os.getpid()}.pt2")
        try:
            compile_package(load_program(program, keep_sizes=True), str(part))
            os.replace(part, package)
        except Exception as error:  # a compiler can raise anything
            reason = " ".join(str(error).split())[:300]
            raise EngineError(f"{program}: AOTInductor cannot compile it: {reason}") from error
        finally:
            part.unlink(missing_ok=True)
    return package
