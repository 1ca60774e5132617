"""Inductor compiles a graph after a pass of ours, whose files are part of its cache keys."""

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo._torch import inductor


def test_a_pass_is_known_by_the_contents_of_its_files(tmp_path: Path) -> None:
    source = tmp_path / "pass.py"
    source.write_text("1")
    first = inductor.make_graph_pass(lambda graph: None, [str(source)])
    second = inductor.make_graph_pass(lambda graph: None, [str(source), str(Path(__file__))])
    assert first.uuid() is not None
    assert first.uuid() != second.uuid()


def test_errors_and_compiler_have_their_names() -> None:
    assert issubclass(inductor.inductor_error(), Exception)
    has_compiler = any(map(shutil.which, ("g++", "gcc", "clang++")))
    with nullcontext() if has_compiler else suppress(Exception):
        assert isinstance(inductor.cpp_compiler(), str)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of Inductor's own imports
def test_the_pass_runs_and_the_graph_is_compiled() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    seen: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        tidy = inductor.make_graph_pass(seen.append, [__file__])
        return inductor.compile_graph(module, inputs, {"joint_custom_pre_pass": tidy, "force_disable_caches": True})

    try:
        function = torch.compile(lambda x: x.sin() * 2, backend=backend, fullgraph=True)
        x = torch.ones(4, requires_grad=True)
        torch.testing.assert_close(function(x), x.sin() * 2)
    finally:
        torch.compiler.reset()
    assert len(seen) == 1, "Inductor no longer calls joint_custom_pre_pass"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of Inductor's own imports
def test_inductor_traces_a_function_in_place_of_an_operator() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    library = torch.library.Library("mezzo_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    traced: list[Any] = []

    def in_parts(x: torch.Tensor) -> torch.Tensor:
        traced.append(x)
        return x + x

    try:
        # after a first compilation, which copies the table
        torch.compile(lambda x: x.cos())(torch.ones(2))
        inductor.decompose_in_inductor({torch.ops.mezzo_test.twice.default: in_parts})
        without_caches = {"force_disable_caches": True}  # otherwise a second run of the test traces nothing
        function = torch.compile(lambda x: torch.ops.mezzo_test.twice(x) + 1, options=without_caches)
        assert function(torch.ones(3)).tolist() == [3.0] * 3
    finally:
        torch.compiler.reset()
    assert traced
