"""The one recorder of the project: which kernel ran in which dtype, where, and by whose decision.

A dispatch mode sits below autograd and autocast, so it sees what really ran. A function mode above them knows the
torch-level call and asks the policy for its reason. Both, and the hooks that tell the module and the optimizer
phase, exist only while at least one recording is on: off, nothing of this file is installed anywhere.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from mezzo._torch.autograd_engine import current_node, graph_task_id, next_node_number, number_of_node
from mezzo._torch.dispatcher import OpOverload, overload_binding
from mezzo._torch.dynamo import kept_out
from mezzo._torch.modes import UncompiledMode, current_dispatch_mode, current_function_mode, no_torch_function
from mezzo.amp import current_policy, is_excluded, is_operator_name, thread_state
from mezzo.amp.user_lines import users_line
from mezzo.files import say
from mezzo.record._kernel_times import RANGE, KernelTimes
from mezzo.record._leaks import LeakTracker
from mezzo.record._operator_stats import OperatorStats
from mezzo.record._seen import EXCLUDED, Op, Phase, Seen, Sink, describe_op, tensors
from mezzo.record._torch_calls import Call, describe_call, numbers

NO_AUTO_CAST = "no auto_cast"
UNLISTED = "unlisted: torch's own rule"
GRADIENT = "gradient: follows the dtype of the forward"

_KEPT_NODES = 2**17  # of the forward, for their backward; a recording of many steps forgets the oldest

_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_is_inference = torch.is_inference_mode_enabled


_Origin = tuple[str, str, str]
"""Module, line and torch-level call that an autograd node comes from."""
_NOWHERE: _Origin = ("", "", "")


class _Place:
    """Where one thread is: torch-level call, modules, optimizer steps. Autograd threads have their own."""

    __slots__ = ("around", "call", "is_excluded", "is_root_named", "modules", "nodes", "num_ranges", "path", "steps")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.modules: list[nn.Module] = []
        self.around: list[tuple[str | None, bool]] = []
        """For each of them, `path` and `is_excluded` of what is around it."""
        self.path: str | None = ""
        self.is_root_named = True
        self.is_excluded = False
        """Whether a module around is kept in float32; known once `path` is."""
        self.nodes: dict[int, _Origin] = {}
        """Of the forward that this thread recomputed in a backward."""
        self.num_ranges = 0
        self.steps: list[int] = []
        """For each optimizer step in progress, how many profiler ranges were open when it began."""


class _Places(threading.local):
    def __init__(self) -> None:
        self.here = _Place()


class _Recording:
    """The modes and hooks of one thread, shared by all its recordings: nested ones are only more sinks."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self._wants_lines = self._wants_times = False
        self._counter: OperatorStats | None = None
        """The one that listens, if all it does is count."""
        self._places = _Places()
        self._nodes: dict[int, _Origin] = {}
        self._ops: dict[int, tuple[Op, Callable[..., Any], list[Sink], Any]] = {}
        """By the operator's id, which is held here: an operator hashes itself in Python."""
        self._paths: dict[int, tuple[str, nn.Module]] = {}
        """By the module's id, which stays its own as long as the module is held here."""
        self._dispatch_mode = _DispatchMode(self)
        self._function_mode = _FunctionMode(self._places)
        self._installed = ExitStack()

    def install(self) -> None:
        with ExitStack() as stack:
            for handle in (
                nn.modules.module.register_module_forward_pre_hook(self._enter_module),
                nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
                register_optimizer_step_pre_hook(self._enter_step),
                register_optimizer_step_post_hook(self._leave_step),
            ):
                stack.callback(handle.remove)
            # Under a dispatch mode Dynamo gives up a frame for good, be it compiled already. Told to stay out, it
            # comes back afterwards. Not loaded, it has nothing to lose.
            stack.enter_context(kept_out())
            stack.enter_context(self._dispatch_mode)
            stack.enter_context(self._function_mode)
            self._installed = stack.pop_all()

    def uninstall(self) -> None:
        top = (current_dispatch_mode(), current_function_mode())
        for mode, ours in zip(top, (self._dispatch_mode, self._function_mode), strict=True):
            if mode is not ours:
                raise RuntimeError(
                    f"{type(mode).__name__} was entered after the operator statistics and is still on; leave it first"
                )
        self._installed.close()

    # -- who listens

    def add(self, sink: Sink) -> None:
        """Let one more listen."""
        self._set_sinks([*self.sinks, sink])

    def remove(self, sink: Sink) -> None:
        """Let one no longer listen."""
        self._set_sinks([each for each in self.sinks if each is not sink])

    def _set_sinks(self, sinks: list[Sink]) -> None:
        self.sinks, self._ops = sinks, {}  # new ones: an autograd thread may be walking through the old
        self._wants_lines = any(sink.wants_lines for sink in sinks)
        self._wants_times = any(sink.wants_times for sink in sinks)
        self._counter = sinks[0] if len(sinks) == 1 and isinstance(sinks[0], OperatorStats) else None

    # -- what runs

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a kernel, and tell who listens. This is the hot path: what is known of an operator is kept."""
        op, run, sinks, _ = self._ops.get(id(func)) or self._learn(func)
        with no_torch_function():  # neither the kernel nor reading a dtype is a torch-level call
            if not sinks:
                out = run(*args, **kwargs)
                if op.range:
                    self._note_range(op.range)
                elif op.has_tensors and next_node_number() - 1 not in self._nodes:
                    place = self._places.here
                    self._locate(place, place.call)  # a view, whose gradient may be a kernel to show
                return out
            if self._wants_times:
                return self._run_timed(op, sinks, func, args, kwargs)
            out = run(*args, **kwargs)
            counter = self._counter
            if counter is None:
                self._show(op, sinks, func, args, kwargs, out, -1, 0.0)
                return out
            place = self._places.here
            call = place.call
            phase, origin = self._locate(place, call)
            name, reason = ("", None) if call is None else (call.name, call.reason)
            if reason is None:
                reason = self._reason(place, call, phase)
            counter.add_kernel(op, args, kwargs, out, phase, origin[0], name, reason)
            return out

    def _learn(self, func: Any) -> tuple[Op, Callable[..., Any], list[Sink], Any]:
        op = describe_op(func)
        run = overload_binding(func)
        known = self._ops[id(func)] = (op, run, [sink for sink in self.sinks if sink.wants(op)], func)
        return known

    def _run_timed(self, op: Op, sinks: list[Sink], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        number = next(numbers)
        with torch.profiler.record_function(f"{RANGE}{number}"):
            begin = time.perf_counter()
            out = func(*args, **kwargs)
            seconds = time.perf_counter() - begin
        self._show(op, sinks, func, args, kwargs, out, number, seconds)
        return out

    def _show(
        self, op: Op, sinks: list[Sink], func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any,
        number: int, seconds: float,
    ) -> None:  # fmt: skip
        place = self._places.here
        call = place.call
        phase, (module, line, forward_op) = self._locate(place, call)
        name, variant, call_number = ("", "", -1) if call is None else (call.name, call.variant, call.number)
        seen = Seen(
            op, func, args, kwargs, out, phase, module, name, self._reason(place, call, phase), line,
            call_number, number, seconds, variant, forward_op if phase == "backward" and not name else "",
        )  # fmt: skip
        for sink in sinks:
            sink.see(seen)

    def _locate(self, place: _Place, call: Call | None) -> tuple[Phase, _Origin]:
        """Return the phase of the kernel that runs now, with its module, line and call; for a gradient those of its forward."""
        if graph_task_id() != -1 or (call is not None and call.in_backward):
            phase: Phase = "backward"
            node = current_node()
            if node is not None and not place.modules:
                number = number_of_node(node)
                return phase, place.nodes.get(number) or self._nodes.get(number) or _NOWHERE
            nodes = self._nodes if node is None else place.nodes
        else:
            # a closure may run the model inside of step()
            phase = "optimizer" if place.steps and not place.modules else "forward"
            nodes = self._nodes
        path = place.path
        if path is None:
            path = self._find_path(place)
        origin = (path, users_line() if self._wants_lines else "", call.name if call else "")
        # The first kernel after a node was made is the node's own: its forward. Later ones may make none.
        if nodes.setdefault(next_node_number() - 1, origin) is origin and len(nodes) > _KEPT_NODES:
            for number in list(itertools.islice(nodes, _KEPT_NODES // 2)):
                del nodes[number]
        return phase, origin

    def _reason(self, place: _Place, call: Call | None, phase: Phase) -> str:
        """Return why a kernel runs in its dtype: what the policy says of the call that it runs under."""
        if call is None or not call.name:
            return GRADIENT if phase == "backward" else NO_AUTO_CAST if current_policy() is None else UNLISTED
        if call.reason is None:
            call.reason = EXCLUDED if place.is_excluded and call.policy is not None else self._ask(call)
        return call.reason

    def _ask(self, call: Call) -> str:
        """Return what the policy says of a call."""
        if call.policy is None:
            return NO_AUTO_CAST
        variant = call.variant
        if not is_operator_name(variant):
            return UNLISTED
        values = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        try:
            return call.policy.decide(variant, tuple(map(_dtype_of, tensors(values)))).reason
        except ValueError:  # a name that lists may hold, but that means no operator
            return UNLISTED

    # -- where it runs

    def _find_path(self, place: _Place) -> str:
        """Return the path of the innermost module that has one, and keep it."""
        # In backward (a checkpoint recomputes) the true root is not on the stack: the names of the forward stay.
        if not place.is_root_named and graph_task_id() == -1:
            self._paths.update((id(named[1]), named) for named in place.modules[0].named_modules())
            place.is_root_named = True
        path: str | None = None
        place.is_excluded = False
        for module in reversed(place.modules):
            if path is None:
                named = self._paths.get(id(module))
                path = None if named is None else named[0]
            if is_excluded(module):
                place.is_excluded = True
        place.path = path or ""
        return place.path

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        place = self._places.here
        if not place.modules:
            place.is_root_named = False
        place.around.append((place.path, place.is_excluded))
        place.modules.append(module)
        place.path = None

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        place = self._places.here
        for index in range(len(place.modules) - 1, -1, -1):
            if place.modules[index] is module:  # whatever is above it was left by an exception that runs no hooks
                place.path, place.is_excluded = place.around[index]
                del place.modules[index:], place.around[index:]
                break

    def _enter_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        place = self._places.here
        place.steps.append(place.num_ranges)

    def _leave_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._places.here.steps:
            self._places.here.steps.pop()

    def _note_range(self, change: int) -> None:
        """Follow the profiler ranges: a step that raises runs no post hook, but it does leave the range around it."""
        place = self._places.here
        place.num_ranges += change
        while place.steps and place.steps[-1] > place.num_ranges:
            place.steps.pop()


class _DispatchMode(UncompiledMode):
    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._run = recording.run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_inference():  # composites arrive whole there, elsewhere in their parts
            with self:
                out = _in_parts(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        return self._run(func, args, kwargs or {})


def _are_plain(types: Iterable[type]) -> bool:
    return all(each is Tensor or each is nn.Parameter for each in types)


def _in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the parts of a composite operator; NotImplemented for one that has none."""
    return func.decompose(*args, **kwargs) if isinstance(func, OpOverload) else NotImplemented


class _FunctionMode(TorchFunctionMode):
    def __init__(self, places: _Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch-level call; Python composites of torch run with the mode on, so that their parts are seen."""
        named = describe_call(func)
        if named.is_plain:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        place = self._places.here
        outer = place.call
        # the policy of now: a kernel of ours may switch it off inside; `here` is the quicker place to look
        place.call = Call(func, named, args, kwargs, outer, thread_state.policy or current_policy())
        try:
            # `outer` is the same: the composite asks once more, let it through
            if named.body is None or (outer is not None and outer.func is func) or not _are_plain(types):
                return func(*args, **kwargs)
            with self:
                return named.body(*args, **kwargs)
        finally:
            place.call = outer


# ------------------------------------------------------------------------------------------------- on and off


class _Active(threading.local):
    """The recording of one thread, and what `enable_operator_stats_collection` has started there."""

    recording: _Recording | None = None
    enabled: OperatorStats | None = None


_active = _Active()


def _start(sink: Sink) -> None:
    if _active.recording is None:
        recording = _Recording()
        recording.install()
        _active.recording = recording
    _active.recording.add(sink)


def _stop(sink: Sink) -> None:
    recording = _active.recording
    assert recording is not None, "a recording is stopped by the thread that started it"
    if recording.sinks == [sink]:
        recording.uninstall()
        _active.recording = None
    recording.remove(sink)


def abandon(sink: Sink) -> None:
    """Stop listening where the recording could not end; its modes go when the next recording of this thread ends."""
    if _active.recording is not None:
        _active.recording.remove(sink)


def counts_operators() -> bool:
    """Whether operator statistics are collected in this thread."""
    recording = _active.recording
    return recording is not None and any(isinstance(sink, OperatorStats) for sink in recording.sinks)


def has_foreign_mode() -> bool:
    """Whether the innermost dispatch mode of this thread is not the recorder's: tracing, fake tensors, another tool."""
    mode = current_dispatch_mode()
    return mode is not None and not isinstance(mode, _DispatchMode)


@contextmanager
def listening(*sinks: Sink, inside: nn.Module | None = None) -> Iterator[None]:
    """Show the kernels that run inside, in this thread and in the backward's, to sinks.

    Args:
        sinks: Whoever listens.
        inside: The module whose forward is in progress, where the recording starts there: paths are below it.
    """
    with ExitStack() as stack:
        for sink in sinks:
            _start(sink)
            stack.callback(_stop, sink)
        if inside is not None and inside not in modules_in_progress():
            recording = _active.recording
            assert recording is not None, "a sink was started"
            recording._enter_module(inside, ())
            stack.callback(recording._leave_module, inside, (), None)
        yield


def modules_in_progress() -> list[nn.Module]:
    """Return the modules whose forward runs in this thread, the outermost first; none without a recording."""
    return [] if _active.recording is None else list(_active.recording._places.here.modules)


def node_origins(nodes: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return module, line and torch-level call of autograd nodes that were made in this thread's recording."""
    known = {} if _active.recording is None else _active.recording._nodes
    return [known.get(number_of_node(node), ("", "", "")) for node in nodes]


@contextmanager
def collect_operator_stats(
    print_table: bool = True, *, include_views: bool = False, kernels: bool = False, leaks: bool = False
) -> Iterator[OperatorStats]:
    """Record the kernels that run inside: which operator, in which dtype, where, and why; print the table at the end.

    Counts what the dispatcher really runs, casts (`_to_copy`) included, in the forward, the backward and the optimizer
    step. The dtype of a call is that of its first floating input (of a list: its first floating element), else of its
    output. Recorded is the calling thread with the autograd threads of its backward. Recordings nest; each sees all.
    After an exception nothing is printed and nothing stays installed; what was recorded can still be read.

    Limits: a recorded operator takes 10 to 50 microseconds more, by the host. Dynamo cannot compile under a
    dispatch mode, so code under `torch.compile` runs, and is counted, as eager code meanwhile, in all threads; the
    compiled form is back afterwards (wrap the model before the recording starts; torch itself warns that an
    `OptimizedModule` meets global hooks). Kernels launched without the dispatcher (a Triton kernel that is not a custom
    operator) are not seen. `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` leave their fused inference path
    while any function mode is on. What runs in neither a backward nor an optimizer step counts as `forward`.

    Args:
        print_table: Print `OperatorStats.table()` when the block ends without an exception.
        include_views: Also count operators that compute nothing: views, and allocations such as `empty`.
        kernels: Also time the kernels of each operator (`OperatorStats.kernels`, `tensor_core_share`), on a GPU by torch's
            profiler, of which there can be one at a time; the table by module shows them.
        leaks: Also follow float32 results of half inputs to the half operators that they feed (`OperatorStats.leaks`).
    """
    stats = OperatorStats(include_views=include_views)
    times, tracker = KernelTimes() if kernels else None, LeakTracker() if leaks else None
    sinks: list[Sink] = [sink for sink in (stats, times, tracker) if sink is not None]
    with nullcontext() if times is None else times.profiled(), listening(*sinks):
        yield stats
    if times is not None:
        stats.kernels = times.rows
    if tracker is not None:
        stats.leaks = tracker.leaks()
    if print_table:
        say(stats.table(), end="")


def enable_operator_stats_collection() -> None:
    """Start recording in this thread, from zero; `disable_operator_stats_collection` ends it and prints the table."""
    if _active.enabled is not None:
        _stop(_active.enabled)
    _active.enabled = OperatorStats()
    _start(_active.enabled)


def disable_operator_stats_collection() -> None:
    """Stop what `enable_operator_stats_collection` started and print its table; silent if nothing was started."""
    stats = _active.enabled
    if stats is None:
        return
    _stop(stats)
    _active.enabled = None
    say(stats.table(), end="")
