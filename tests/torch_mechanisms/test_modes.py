"""Modes are found, switched off, and entered without loading Dynamo."""

import subprocess
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mezzo._torch import modes


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Kernels(modes.UncompiledMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_function_mode_is_asked_inside_no_torch_function() -> None:
    with Calls() as mode:
        with modes.no_torch_function():
            torch.ones(1).sum()
        assert mode.seen == [], "torch._C.DisableTorchFunction no longer switches function modes off"
        torch.ones(1)
    assert mode.seen


def test_the_innermost_modes_are_found() -> None:
    assert modes.current_function_mode() is None
    assert modes.current_dispatch_mode() is None
    with Calls() as calls, Kernels() as kernels:
        assert modes.current_function_mode() is calls
        assert modes.current_dispatch_mode() is kernels


def test_no_dispatch_mode_sees_what_runs_inside_no_dispatch_modes() -> None:
    with Kernels() as mode:
        with modes.no_dispatch_modes():
            torch.ones(1).sum()
        assert mode.seen == []
        torch.ones(1)
    assert mode.seen == ["aten.ones.default"]


def test_a_mode_does_not_load_dynamo() -> None:
    code = """
import sys, torch
from mezzo._torch.modes import UncompiledMode
class Mode(UncompiledMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
with Mode():
    torch.ones(1)
assert "torch._dynamo" not in sys.modules, "entering a dispatch mode loads Dynamo, which takes seconds"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
