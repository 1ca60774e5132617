"""Runs tests of Triton kernels without a GPU, in Triton's interpreter, and compiles the kernels that they launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_builds import Build


def run_interpreted(*arguments: str, builds_all: bool = True) -> list[Build]:
    """Run pytest with `arguments` in another process, where kernels run in Python on the CPU; it must pass.

    Afterwards each launch is compiled for GPUs, because the interpreter takes code that Triton's compiler refuses.

    Args:
        arguments: Files and tests.
        builds_all: False compiles one launch of each kernel, for one kind of GPU: a build takes 0.2 s.

    Returns:
        The builds.
    """
    with tempfile.TemporaryDirectory() as folder:
        launches = Path(folder) / "launches.jsonl"
        # numpy, which the interpreter computes with, warns of the infinities that the tests are about.
        plugins = ("-p", "no:cacheprovider", "-p", "launch_recorder")
        command = [sys.executable, "-m", "pytest", *plugins, "-W", "ignore::RuntimeWarning", *arguments]
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "MEZZO_TEST_LAUNCHES": str(launches),
            "PYTHONPATH": paths,
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        found = [json.loads(line) for line in launches.read_text(encoding="utf-8").splitlines()]
    assert found, f"no kernel was launched by {' '.join(arguments)}"
    from gpu_builds import compile_launches

    return compile_launches(found, builds_all)
