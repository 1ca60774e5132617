"""Builds Triton kernels for a GPU on a machine without one: the launches that `launch_recorder` wrote down.

The interpreter runs a kernel as Python, so it takes code that Triton's compiler refuses. This calls the compiler, up to
the machine code of `ptxas`.
"""

import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

CAPABILITIES = (80, 90)
"""A100 and H100 or H200."""
FP8_CAPABILITY = 89
"""The first that has FP8."""


class Build(NamedTuple):
    """A kernel as machine code."""

    kernel: str
    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread that did not fit into registers."""


def compile_launches(launches: Sequence[dict[str, Any]], builds_all: bool) -> list[Build]:
    """Compile launches for each kind of GPU that has their dtypes; a failure names the launch.

    With `builds_all=False` one launch of each kernel, for the newest GPU.
    """
    builds = []
    if not builds_all:
        launches = list({launch["kernel"]: launch for launch in launches}.values())
    for launch in launches:
        for capability in CAPABILITIES if builds_all else CAPABILITIES[-1:]:
            if capability < FP8_CAPABILITY and _has_fp8(launch):
                continue
            try:
                builds.append(build(launch, capability))
            except Exception as error:
                raise AssertionError(f"sm_{capability} cannot run {json.dumps(launch)}: {error}") from error
    return builds


def _has_fp8(launch: dict[str, Any]) -> bool:
    texts = [str(value) for value in launch["arguments"].values()]
    return any("fp8" in text or "float8" in text for text in texts) or launch["arguments"].get("FP8") is True


def build(launch: dict[str, Any], capability: int) -> Build:
    """Compile the kernel of a launch; raises what Triton and ptxas raise."""
    kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
    arguments = {name: _decode(value) for name, value in launch["arguments"].items()}
    with _pretended(capability):
        kernel.device_caches.clear()
        compiled = kernel.warmup(**arguments, **launch["options"], grid=(1,))
    return Build(launch["kernel"], *_resources(compiled.asm["cubin"]))


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _Pointer(getattr(torch, value["tensor"]), value["is_aligned"])
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    return getattr(importlib.import_module(value["module"]), value["function"])


class _Pointer(MockTensor):
    def __init__(self, dtype: torch.dtype, is_aligned: bool) -> None:
        super().__init__(dtype)
        self._address = 0 if is_aligned else 2

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def _pretended(capability: int) -> Iterator[None]:
    """Let Triton compile for a GPU that is not there."""
    device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    before = driver._active
    driver.set_active(device)
    try:
        yield
    finally:
        driver._active = before


_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([_TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
