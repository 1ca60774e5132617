"""Capture of a function as a graph with explicit casts, and its compilation with autocast off.

Dynamo records the calls of the function. AOTAutograd traces them, forward and backward, under the
policy: the same kernels as in eager mode decide every cast, so the casts become operators of the
graph. Redundant casts are removed, and Inductor compiles the rest with autocast off.
"""

from __future__ import annotations

import copy
import functools
import linecache
import re
import shutil
import traceback
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mezzo._torch.aot_autograd import trace_and_run
from mezzo._torch.autocast_state import is_any_autocast_enabled
from mezzo._torch.dynamo import (
    dynamo_errors,
    let_dynamo_call_loggers,
    loggers_called_while_tracing,
    recurrent_layers_traced,
)
from mezzo._torch.inductor import cacheable, compile_graph, cpp_compiler, inductor_error, make_graph_pass
from mezzo._torch.step_tier import has_triton, tier_asked
from mezzo.amp import auto_cast, current_policy, source_digest
from mezzo.errors import MezzoError, RunError, unknown_choice
from mezzo.fp8 import fp8_written_by_producers, share_delayed_operands
from mezzo.kernels import uses_own_operators
from mezzo.record import OperatorStats
from mezzo.static import _region
from mezzo.static._activations import ACTIVATION_CALLS, fuse_activations
from mezzo.static._batch_norms import JOINED_CALLS, fuse_batch_norms
from mezzo.static._casts import drop_needless_casts
from mezzo.static._compared import store_compared_values
from mezzo.static._convolutions import use_own_convolutions
from mezzo.static._masks import drop_needless_masks
from mezzo.static._norms import NORM_CALLS, fuse_norms
from mezzo.static._operators import count_operators
from mezzo.static._region import CastRules, NoGuardError, casting_region
from mezzo.static._rows import take_sums_of_gradients
from mezzo.static._traced_regions import REGION_MARKERS, regions_traced

BACKENDS = ("inductor", "aot_eager", "eager")

Function = Callable[..., Any]

_KEPT = 32
"""How many graphs a capture keeps for tables and prints."""

#: A 1x1 convolution in channels-last is a matrix product, for which cuBLAS is faster.
_ON_CUDA = {"conv_1x1_as_mm": True}


class CaptureError(MezzoError):
    """A function cannot be captured as one graph."""


class CompilerError(RunError):
    """The compiler failed on a captured graph."""


def named(value: Tensor, name: str) -> Tensor:
    """Mark a tensor inside a captured function with the name of its variable."""
    return value


_MARKERS = (*_region.MARKERS, named)


@functools.cache
def _prepare_dynamo() -> None:
    for marker in _MARKERS:
        torch.compiler.allow_in_graph(marker)
    let_dynamo_call_loggers()


def _describe(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: `{linecache.getline(frame.filename, frame.lineno or 0).strip()}`"


class CapturedGraph:
    """The captured graph of one call: the forward and, in training, the backward, with casts."""

    def __init__(self, module: GraphModule, inputs: Sequence[Any], precision: CastRules) -> None:
        self._module, self._inputs, self.precision = module, inputs, precision
        self._has_backward = torch.is_grad_enabled()

    def refuse_reads_on_host(self) -> None:
        """Raise CaptureError if the graph reads a value from the device, which a CUDA graph cannot do.

        Dynamo puts `x.item()` into its graph as long as no branch depends on it (torch 2.12 and later).
        """
        for node in self.calls_of_dynamo:
            if node.op == "call_method" and node.target in ("item", "tolist"):
                frame = innermost_user_frame(_printed_stack(node.meta.get("stack_trace") or ""))
                where = "" if frame is None else f"; it stops at {_describe(frame)}"
                raise CaptureError(
                    f"the step cannot be captured as one CUDA graph{where} (it reads a value from the device on the host); "
                    "compute with the tensor itself, or run with backend='eager'"
                )

    @functools.cached_property
    def parts(self) -> tuple[GraphModule, GraphModule | None]:
        """The graphs of forward and backward in aten operators, neither decomposed nor fused."""
        found: list[GraphModule] = []
        region = casting_region(self.precision) if self.precision.is_on else auto_cast(enable=False)
        with torch.set_grad_enabled(self._has_backward), region:
            _aot(copy.deepcopy(self._module), self._inputs, found.append)
        return found[0], found[1] if len(found) > 1 else None

    @property
    def calls_of_dynamo(self) -> list[Node]:
        """The calls as the user wrote them, before they are traced into operators."""
        return list(self._module.graph.nodes)

    def operators(self, include_views: bool = False) -> OperatorStats:
        """Return how many calls of each operator compute in which dtype."""
        return count_operators(*self.parts, include_views)

    def __str__(self) -> str:
        forward, backward = self.parts
        texts = [f"forward, {self.precision}:", str(forward.graph)]
        return "\n".join(texts if backward is None else [*texts, "backward:", str(backward.graph)])


class Capture:
    """Compiles functions under one set of cast rules, and keeps the captured graphs."""

    def __init__(
        self, precision: CastRules, backend: str = "inductor", float32_tensors: dict[int, str] | None = None
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(unknown_choice("backend", backend, BACKENDS))
        self.precision = precision
        self.backend = _usable(backend)
        self.graphs: deque[CapturedGraph] = deque(maxlen=_KEPT)
        self.knows_scales = False
        """Whether every FP8 layer has a delayed scale, so that kernels can write FP8 at once."""
        self.saves_memory = False
        """Whether the backward pass computes cheap results again instead of keeping them."""
        self._names = float32_tensors or {}
        """Parameters by identity, with their names."""

    def compile(self, function: Function, *, dynamic: bool | None = False) -> Function:
        """Return a function that is captured at its first call.

        Call it inside `casting_region(self.precision)`.

        Args:
            function: The function to capture.
            dynamic: False captures each shape of the inputs; None makes a size dynamic once it
                changes.

        Raises, when called:
            CaptureError: The function cannot be captured as one graph; the message names the line.
            NoGuardError: The guard option is on, and the graph has no guard.
        """
        if self.backend == "eager" and not self.precision.float32_names:
            return self._checked(function)
        _prepare_dynamo()
        compiled = torch.compile(_own_copy(function), backend=self._compile_graph, fullgraph=True, dynamic=dynamic)
        has_regions = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_regions
            if torch.compiler.is_compiling():  # inside of another capture, which traces the function itself
                return function(*args, **kwargs)
            if not has_regions:
                try:
                    with _region.markers_balanced(), _everything_traced(args):
                        return compiled(*args, **kwargs)
                except _dynamo_errors() as error:
                    if not _is_about_regions(error):
                        raise _explained(error) from error
                    has_regions = True
            try:
                with _region.markers_balanced(), _everything_traced(args), regions_traced():
                    return compiled(*args, **kwargs)
            except _dynamo_errors() as error:
                raise _explained(error) from error

        return call

    def _checked(self, function: Function) -> Function:
        if not (self.precision.use_guard and self.precision.is_on):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            before = _region.guards_entered()
            result = function(*args, **kwargs)
            _region.refuse_missing_guard(_region.guards_entered() > before)
            return result

        return call

    def _compile_graph(self, module: GraphModule, inputs: Sequence[Any]) -> Function:
        """Compile the graph of Dynamo; this is its backend."""
        _region.close_regions()  # Dynamo may have restarted
        if self.precision.use_guard and self.precision.is_on:
            _region.refuse_missing_guard(any(node.target is _region.enter_guard for node in module.graph.nodes))
        self._place_markers(module.graph)
        drop_needless_masks(module.graph)
        module.recompile()
        precision = self.precision if self.precision.is_on else CastRules(current_policy())
        self.graphs.append(CapturedGraph(copy.deepcopy(module), _without_memory(module, inputs), precision))
        if self.backend == "eager":
            return module
        if self.backend == "aot_eager":
            return _aot(module, inputs, lambda _: None)
        joined = fuse_batch_norms(module.graph)
        if not self.saves_memory:  # a kernel of mezzo's is not computed again
            joined += fuse_activations(module.graph) + fuse_norms(module.graph)
        if joined:
            module.recompile()
        options = _ON_CUDA if any(isinstance(value, Tensor) and value.is_cuda for value in inputs) else {}
        with fp8_written_by_producers() if self.knows_scales else nullcontext():
            settings = {**_settings(inputs), **options}
            return cast(Function, compile_graph(module, inputs, settings, saves_memory=self.saves_memory))

    def _place_markers(self, graph: Graph) -> None:
        """Put float32 regions around calls that use a named variable.

        Remove markers that have no effect.
        """
        for node in self._in_float32(graph):
            with graph.inserting_before(node):
                graph.call_function(_region.enter_float32)
            with graph.inserting_after(node):
                graph.call_function(_region.leave_float32)
        for node in list(graph.nodes):
            if node.target is named:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target in (_region.enter_guard, _region.leave_guard) and not self.precision.use_guard:
                graph.erase_node(node)

    def _in_float32(self, graph: Graph) -> list[Node]:
        """Return the calls that read or write a variable that stays in float32."""
        wanted = self.precision.float32_names
        if not wanted:
            return []
        black = []
        for node in graph.nodes:
            if node.target is named and node.args[1] in wanted:
                black += [node, node.args[0]]
            elif node.op == "placeholder" and self._name_of(node) in wanted:
                black.append(node)
        touching = {call for node in black for call in (node, *node.users)}
        return [n for n in graph.nodes if n in touching and n.op.startswith("call_") and n.target not in _MARKERS]

    def _name_of(self, placeholder: Node) -> str | None:
        argument = placeholder.meta.get("grapharg")
        return None if argument is None else self._names.get(id(argument.example))


def _without_memory(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the fake inputs of Dynamo: a kept graph must not keep a batch or weights alive."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [node.meta.get("example_value", value) for node, value in zip(nodes, inputs, strict=True)]


@contextmanager
def _everything_traced(args: Sequence[Any]) -> Iterator[None]:
    """Inside, Dynamo traces loggers, and recurrent layers of a CPU. Those of cuDNN were not tried in a CUDA graph."""
    on_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in args)
    with loggers_called_while_tracing(), nullcontext() if on_cuda else recurrent_layers_traced():
        yield


def _own_copy(function: Function) -> Function:
    """Return the function with its own code object: Dynamo limits compilations per code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _aot(module: GraphModule, inputs: Sequence[Any], show: Callable[[GraphModule], None]) -> Function:
    """Trace forward and backward into aten operators; return a function that runs them.

    Each of the two graphs is passed to `show`.
    """
    return cast(Function, trace_and_run(module, inputs, _drop_casts, show))


def _drop_casts(module: GraphModule) -> None:
    drop_needless_casts(module.graph)
    module.recompile()


def _settings(inputs: Sequence[Any]) -> dict[str, Any]:
    """Return Inductor's settings for a graph: the pass over it, and what its caches on disk depend on."""
    devices = sorted({value.device.type for value in inputs if isinstance(value, Tensor)})
    tiers = [f"{name} {has_triton(torch.device(name))}" for name in devices]
    key = f"{source_digest()} {tier_asked()} {uses_own_operators()} {tiers}"
    functions = *_region.MARKERS, *REGION_MARKERS, *JOINED_CALLS, *ACTIVATION_CALLS, *NORM_CALLS
    return {
        "joint_custom_pre_pass": make_graph_pass(_tidy, key),
        **cacheable(functions, f"{key} {_region.markers_key()}"),
    }


def _tidy(graph: Graph) -> None:
    """Change a graph before Inductor compiles it."""
    if is_any_autocast_enabled():
        raise RuntimeError("autocast is on while Inductor compiles: casts would be decided a second time")
    drop_needless_casts(graph)
    store_compared_values(graph)
    use_own_convolutions(graph)
    take_sums_of_gradients(graph)
    share_delayed_operands(graph)


@functools.cache
def missing_compiler() -> str | None:
    """Return why Inductor cannot compile on this machine; None if it can."""
    try:
        compiler = cpp_compiler()
    except Exception as error:  # noqa: BLE001  its class moved between releases of torch
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None if shutil.which(compiler) else f"{compiler} was not found"


@functools.cache
def _notice_missing_compiler(reason: str) -> None:
    warnings.warn(
        f"no C++ compiler ({reason}): captured graphs run operator by operator (backend 'aot_eager'), with the same results",
        UserWarning,
        stacklevel=5,
    )


def _usable(backend: str) -> str:
    """Return the backend, or its fallback on a machine without a compiler."""
    reason = missing_compiler() if backend == "inductor" else None
    if reason is None:
        return backend
    _notice_missing_compiler(reason)
    return "aot_eager"


def _dynamo_errors() -> tuple[type[BaseException], ...]:
    return dynamo_errors().TorchDynamoException, dynamo_errors().FailOnRecompileLimitHit


def _is_about_regions(error: BaseException) -> bool:
    """Whether Dynamo stopped at an `auto_cast` region.

    Up to torch 2.13 its message names the class. Later ones trace into the methods that `_traced_regions` gives it.
    """
    is_named = isinstance(error, dynamo_errors().Unsupported) and auto_cast.__name__ in str(error)
    return is_named or any(frame.filename == _TRACED_REGIONS for frame in _stack(error))


def _explained(error: BaseException) -> BaseException:
    """Return Dynamo's error as one line with the place in the user's code."""
    cause = error.__cause__ or getattr(error, "inner_exception", None)
    if isinstance(cause, NoGuardError):
        return cause
    if isinstance(error, (dynamo_errors().BackendCompilerFailed, inductor_error())):
        first = " ".join(str(cause or error).split())[:300]
        return CompilerError(
            f"the compiler failed on the captured graph: {first}; backend='aot_eager' runs it without one"
        )
    if isinstance(error, dynamo_errors().FailOnRecompileLimitHit):
        return CaptureError(
            "captured again and again: something that the forward reads changes from call to call (a counter, a list, the "
            "number of dimensions); take it out of the step, or run with backend='eager'"
        )
    reason = _reason(error)
    frame = _user_frame(error)
    of_region = f"; {_REGION_ADVICE}" if _is_about_regions(error) else ""
    if frame is None:
        return CaptureError(f"the step cannot be captured as one graph: {reason}{of_region}")
    return CaptureError(
        f"the step cannot be captured as one graph; it stops at {_describe(frame)} ({reason}){of_region}; take it out of the "
        "step, or run with backend='eager'"
    )


_REGION_ADVICE = "write `with auto_cast(...):` in the captured code, with constants as arguments, or around the call"
_TRACED_REGIONS = str(Path(__file__).with_name("_traced_regions.py"))
_CONTEXT = "Developer debug context:"


def _reason(error: BaseException) -> str:
    """Return why Dynamo stopped: the first line of its message, and that of the original error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    context = next((line.removeprefix(_CONTEXT).strip() for line in lines if line.startswith(_CONTEXT)), "")
    raised = next((found[1] for line in lines if (found := re.search(r": got (\w+\(.*\))$", line))), "")
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ is not None else ""
    words = [word for word in (first, context, raised, cause) if word]
    return "; ".join(dict.fromkeys(words))[:400]


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code in which Dynamo stopped."""
    return innermost_user_frame(_stack(error))


def _stack(error: BaseException) -> Sequence[traceback.FrameSummary]:
    """Return the frames of the traced code, those of mezzo included."""
    return getattr(error, "real_stack", None) or _printed_stack(str(error))


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)


def _printed_stack(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of a stack in a message; some errors of Dynamo have no other stack."""
    found = _FRAME.finditer(text)
    return [traceback.FrameSummary(frame["file"], int(frame["line"]), frame["name"]) for frame in found]


def innermost_user_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the last frame that is neither torch's nor mezzo's."""
    ours = str(Path(__file__).parents[1])
    torchs = str(Path(torch.__file__).parent)
    frames = [frame for frame in stack if not frame.filename.startswith((ours, torchs))]
    return frames[-1] if frames else None
