"""Scripted functions are called through the wrapper, and traces are noticed."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from mezzo._torch import patches, script


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_optimiser_is_switched_for_this_thread() -> None:
    before = script.scripts_are_optimised()
    try:
        for is_on in (False, True):
            script.optimise_scripts(is_on)
            assert script.scripts_are_optimised() is is_on
    finally:
        script.optimise_scripts(before)


def test_calls_of_scripted_functions_and_modules_are_wrapped() -> None:
    seen: list[str] = []

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(scripted: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(scripted).__name__)
            return call(scripted, *args, **kwargs)

        return run

    kinds = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    before = [kind.__call__ for kind in kinds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.script(double)
        module = torch.jit.script(torch.nn.ReLU())
    script.wrap_script_calls(around)
    try:
        function(torch.ones(1))
        module(torch.ones(1))
    finally:
        for kind, call in zip(kinds, before, strict=True):
            kind.__call__ = call
            patches._wrapped.discard((id(kind), "__call__", around))
    assert {"ScriptFunction", "ScriptMethod"} <= set(seen), f"calls that were seen: {seen}"


def test_a_trace_is_noticed() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(script.tracing_state() is not None)
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(look, torch.ones(1), check_trace=False)
    assert seen == [True]
    assert script.tracing_state() is None
