"""A plugin of pytest: writes down every launch of a kernel in Triton's interpreter, so that `gpu_builds` can compile it."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

VARIABLE = "MEZZO_TEST_LAUNCHES"
"""The file to write."""


def encode(value: Any) -> Any:
    """Return what the build of a kernel depends on, as JSON."""
    if isinstance(value, tl.constexpr):
        return encode(value.value)
    if isinstance(value, torch.Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "is_aligned": value.data_ptr() % 16 == 0}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, InterpretedFunction):
        return {"function": value.fn.__name__, "module": value.fn.__module__}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"no way to write down {value!r}")


def stand_in(value: Any) -> Any:
    """Return a number for which Triton makes the same build: it knows 1, multiples of 16, and 64 bits."""
    if isinstance(value, float):
        return 0.5
    if not isinstance(value, int) or isinstance(value, bool) or value == 1:
        return value
    return (0 if value % 16 == 0 else 3) + (2**40 if abs(value) >= 2**31 else 16)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish() -> Any:
    """Write the file."""
    Path(os.environ[VARIABLE]).write_text("\n".join(sorted(_launches)), encoding="utf-8")
    return (yield)


_launches: set[str] = set()
_run = InterpretedFunction.run


def _recorded(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    arguments, for_build = dict(zip(self.arg_names, args, strict=False)), {}
    for name, value in options.items():
        (arguments if name in self.arg_names else for_build)[name] = value
    for name, parameter in inspect.signature(self.fn).parameters.items():
        is_constant = "constexpr" in str(parameter.annotation)
        if name in arguments:
            arguments[name] = encode(arguments[name] if is_constant else stand_in(arguments[name]))
    launch = {"module": self.fn.__module__, "kernel": self.fn.__name__, "arguments": arguments, "options": for_build}
    _launches.add(json.dumps(launch, sort_keys=True))
    return _run(self, *args, grid=grid, warmup=warmup, **options)


InterpretedFunction.run = _recorded
