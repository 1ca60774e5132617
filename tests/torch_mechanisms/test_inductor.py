"""Inductor compiles a graph after mezzo's pass. The key of the pass is part of Inductor's cache keys."""

import shutil
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from mezzo._torch import inductor


def test_a_pass_has_its_key() -> None:
    assert inductor.make_graph_pass(lambda graph: None, "first").uuid() == "first"


def of_mezzo(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_torch_caches_graphs_with_functions_that_are_named() -> None:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable
    from torch._inductor import config

    graph = torch.fx.Graph()
    graph.output(graph.call_function(of_mezzo, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(BypassAOTAutogradCache):
        check_cacheable(module)
    with config.patch(unsafe_marked_cacheable_functions={"einops.pack": "of the user"}):
        settings = inductor.cacheable([of_mezzo], "key")
    assert settings["unsafe_marked_cacheable_functions"]["einops.pack"] == "of the user"
    with config.patch(settings):
        check_cacheable(module)
    with config.patch(inductor.cacheable([of_mezzo], "other")):
        other = config.save_config_portable()
    with config.patch(settings):
        assert config.save_config_portable() != other, "the key is no part of the keys of caches"


def test_errors_and_compiler_have_their_names() -> None:
    assert issubclass(inductor.inductor_error(), Exception)
    has_compiler = any(map(shutil.which, ("g++", "gcc", "clang++")))
    with nullcontext() if has_compiler else suppress(Exception):
        assert isinstance(inductor.cpp_compiler(), str)


@pytest.mark.slow
def test_the_pass_runs_and_the_graph_is_compiled() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    seen: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        tidy = inductor.make_graph_pass(seen.append, "test")
        with torch.compiler.config.patch(force_disable_caches=True):
            return inductor.compile_graph(module, inputs, {"joint_custom_pre_pass": tidy})

    try:
        function = torch.compile(lambda x: x.sin() * 2, backend=backend, fullgraph=True)
        x = torch.ones(4, requires_grad=True)
        torch.testing.assert_close(function(x), x.sin() * 2)
    finally:
        torch.compiler.reset()
    assert len(seen) == 1, "Inductor no longer calls joint_custom_pre_pass"


@pytest.mark.slow
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
        function = torch.compile(lambda x: torch.ops.mezzo_test.twice(x) + 1)
        with torch._functorch.config.patch(enable_autograd_cache=False):  # or a second run of the test traces nothing
            assert function(torch.ones(3)).tolist() == [3.0] * 3
    finally:
        torch.compiler.reset()
    assert traced
