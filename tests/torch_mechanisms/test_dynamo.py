"""Dynamo leaves hidden functions alone, can be kept out, and calls back."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from mezzo._torch import dynamo


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    yield
    torch.compiler.reset()


def test_a_hidden_function_breaks_the_graph_and_gives_its_advice() -> None:
    traced = []

    @dynamo.hide_from_dynamo("call it outside, says mezzo")
    def hidden(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_dynamo_compiling())
        return x + 1

    def function(x: torch.Tensor) -> torch.Tensor:
        return hidden(x * 2) * 3

    assert torch.compile(function, backend="eager")(torch.ones(1)).item() == 9
    assert traced == [False], "Dynamo traces functions that _torchdynamo_disable marks"
    torch.compiler.reset()
    with pytest.raises(dynamo.dynamo_errors().Unsupported, match="call it outside, says mezzo"):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(1))


def test_hiding_and_keeping_out_do_not_load_dynamo() -> None:
    code = """
import sys
from mezzo._torch import dynamo
dynamo.hide_from_dynamo("advice")(lambda: None)
with dynamo.kept_out():
    pass
dynamo.call_around_compilations(print, print)
assert dynamo.DYNAMO not in sys.modules, "mezzo._torch.dynamo loads Dynamo, which takes seconds"
dynamo.load_dynamo()
assert dynamo.DYNAMO in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiled_functions_run_as_eager_code_where_dynamo_is_kept_out() -> None:
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    function = torch.compile(lambda x: x * 2, backend=backend)
    dynamo.load_dynamo()
    with dynamo.kept_out():
        assert function(torch.ones(1)).item() == 2
    assert graphs == []
    function(torch.ones(1))
    assert len(graphs) == 1


def test_compilations_are_announced_also_after_a_reset() -> None:
    seen: list[str] = []

    def start(*_: Any) -> None:
        seen.append("start")

    def end(*_: Any) -> None:
        seen.append("end")

    dynamo.load_dynamo()
    try:
        for _ in range(2):
            for _ in range(2):
                dynamo.call_around_compilations(start, end)
            torch.compile(lambda x: x * 2, backend="eager")(torch.ones(1))
            assert seen == ["start", "end"], "Dynamo's callback handler is gone: disk caches mix up policies"
            seen.clear()
            torch.compiler.reset()
    finally:
        handler = sys.modules["torch._dynamo.callback"].callback_handler
        for callbacks, own in ((handler.start_callbacks, start), (handler.end_callbacks, end)):
            if own in callbacks:
                callbacks.remove(own)


def test_constants_are_called_while_it_traces() -> None:
    calls = []

    def number() -> int:
        calls.append(1)
        return 5

    dynamo.take_as_constants([number])
    function = torch.compile(lambda x: x * number(), backend="eager", fullgraph=True)
    assert [function(torch.ones(1)).item() for _ in range(3)] == [5, 5, 5]
    assert len(calls) == 1


def test_errors_have_the_names_that_graph_mode_explains() -> None:
    errors = dynamo.dynamo_errors()
    for name in ("TorchDynamoException", "Unsupported", "BackendCompilerFailed", "FailOnRecompileLimitHit"):
        assert issubclass(getattr(errors, name), Exception)


def test_a_compiled_call_is_known_on_the_stack() -> None:
    found = []

    @dynamo.hide_from_dynamo("")
    def look() -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            found.append(dynamo.is_frame_of_compiled_call(frame))
            frame = frame.f_back

    def function(x: torch.Tensor) -> torch.Tensor:
        look()
        return x * 2

    look()
    assert not any(found)
    found.clear()
    torch.compile(function, backend="eager")(torch.ones(1))
    assert any(found), "Dynamo's wrapper has another name: the operator log would record compiled code"


def test_the_module_inside_a_compiled_one_is_found() -> None:
    model = torch.nn.Linear(1, 1)
    assert dynamo.uncompiled(torch.compile(model, backend="eager")) is model
    assert dynamo.uncompiled(model) is None
