"""Calls and conversions of modules go through the methods that are wrapped."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzo._torch import module_calls, patches

MARK = "_mezzo_test_mark"


class Net(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Child(Net):
    pass


def test_calls_of_a_class_and_of_those_below_it_are_wrapped_once() -> None:
    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: call(module, *args, **kwargs) + 1

    for kind in (Net, Child, Net):
        module_calls.wrap_calls_of_class(kind, around, MARK)
    assert (Net()(1), Child()(1)) == (2, 2), "nn.Module.__call__ no longer ends in _call_impl"
    assert nn.Identity()(1) == 1


def test_conversions_go_through_one_method() -> None:
    seen: list[str] = []

    def around(apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return apply(module, *args, **kwargs)

        return run

    before = nn.Module._apply
    module_calls.wrap_conversions(around)
    try:
        model = nn.Sequential(nn.Linear(1, 1))
        for convert in (nn.Module.half, nn.Module.float, nn.Module.bfloat16, lambda net: net.to(torch.float64)):
            convert(model)
    finally:
        nn.Module._apply = before
        patches._wrapped.discard((id(nn.Module), "_apply", around))
    assert seen.count("Linear") == 4, "a conversion of modules no longer goes through nn.Module._apply"


def test_the_call_of_all_modules_is_replaced_and_put_back() -> None:
    own = nn.Module.__call__
    before = module_calls.replace_call(lambda module, *args: "ours")
    try:
        assert before is own
        assert nn.Identity()(1) == "ours"
    finally:
        module_calls.replace_call(before)
    assert nn.Identity()(1) == 1


def test_dynamo_does_not_take_the_replacement_for_torchs_call() -> None:
    """It notes torch's call when it is imported, which compilers of a static program do inside of the guard."""
    code = """if True:
        from mezzo._torch.module_calls import replace_call
        before = replace_call(lambda module, *args: "ours")
        from torch._dynamo.variables import nn_module
        assert nn_module.unpatched_nn_module_call is before
        """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_call_is_known_by_its_code_on_the_stack() -> None:
    class Look(nn.Module):
        def forward(self) -> bool:
            frame = sys._getframe()
            while frame is not None and frame.f_code is not module_calls.CALL_CODE:
                frame = frame.f_back
            return frame is not None and frame.f_locals["self"] is self

    assert Look()(), "a call of a module is no longer seen as _call_impl on the stack"


def test_a_compiled_call_is_used_and_not_copied() -> None:
    layer = nn.Identity()
    assert module_calls.compiled_call(layer) is None
    module_calls.set_compiled_call(layer, lambda x: x + 1)
    assert layer(1) == 2
    assert module_calls.plain_call(layer)(1) == 1
    assert copy.deepcopy(layer)(1) == 1, "Module._compiled_call_impl is copied now"
