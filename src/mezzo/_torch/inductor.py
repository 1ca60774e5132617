"""Inductor, the compiler of `torch.compile`: compiles a captured graph after a pass of mezzo.

Why: graph mode hands Inductor a graph that holds its casts, and tidies it first. The public
`torch.compile` would trace it once more. Everything is imported when it is called: Inductor takes
seconds to import. Operators of mezzo that Inductor should look into become several operators there.
Releases: 2.11 to 2.15.
Without it: graph mode runs its graphs operator by operator (backend `aot_eager`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch.fx import Graph, GraphModule

from mezzo._torch.compiler_messages import write_messages_lazily


def compile_graph(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], *, saves_memory: bool = False
) -> Any:
    """Return a compiled graph.

    Args:
        module: What Dynamo captured.
        inputs: Example inputs.
        options: Settings of Inductor for this graph, `joint_custom_pre_pass` among them.
        saves_memory: The backward pass may compute the inputs of its products again. By default torch keeps
            them, also where they follow from other tensors that it keeps.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    write_messages_lazily()
    with config.patch(ban_recompute_materialized_backward=False) if saves_memory else nullcontext():
        return compile_fx(module, list(inputs), config_patches=options)


def decompose_in_inductor(functions: dict[Any, Callable[..., Any]]) -> None:
    """Let Inductor trace functions in place of operators.

    Args:
        functions: By operator: the function that it traces, with the same arguments and results.
    """
    from torch._inductor import decomposition

    new = {
        operator: function for operator, function in functions.items() if operator not in decomposition.decompositions
    }
    if new:
        decomposition.decompositions.update(new)
        # a copy of the table, made by the first compilation of the process
        decomposition.fast_random_decomps.cache_clear()


def cacheable(functions: Iterable[Callable[..., Any]], key: str) -> dict[str, Any]:
    """Return settings with which torch caches graphs that call functions of mezzo on disk.

    By default it traces such a graph in every process again: AOTAutograd knows only torch's functions.

    Args:
        functions: Functions of modules, which Dynamo left in its graph.
        key: Becomes part of cache keys. It holds everything that the functions depend on, besides their arguments.
    """
    from torch._inductor import config

    names = {f"{function.__module__}.{function.__name__}": key for function in functions}
    return {"unsafe_marked_cacheable_functions": {**config.unsafe_marked_cacheable_functions, **names}}


def make_graph_pass(run: Callable[[Graph], None], key: str) -> Any:
    """Return a pass over graphs for Inductor's options.

    Its key becomes part of cache keys: it holds everything that the pass depends on, besides the graph.
    """
    return _pass_class()(run, key)


@functools.cache
def _pass_class() -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __init__(self, run: Callable[[Graph], None], key: str) -> None:
            self._run, self._key = run, key

        def __call__(self, graph: Graph) -> None:
            self._run(graph)

        def uuid(self) -> Any:
            return self._key

    return Pass


def cpp_compiler() -> str:
    """Return the C++ compiler that Inductor would call.

    Raises:
        Exception: There is none; the class of the error moved between releases.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def inductor_error() -> type[BaseException]:
    """Return the class of Inductor's errors."""
    from torch._inductor.exc import InductorError

    return InductorError


def compile_package(program: Any, path: str) -> None:
    """Compile an exported program into a package file, which needs no Python to run."""
    import torch._inductor

    torch._inductor.aoti_compile_and_package(program, package_path=path)


def load_package(path: str) -> Any:
    """Return the function of a package that `compile_package` wrote.

    It runs native code: load only files that you trust.
    """
    import torch._inductor

    return torch._inductor.aoti_load_package(path)
