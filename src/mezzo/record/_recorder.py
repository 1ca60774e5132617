"""The recorder: which kernel ran in which dtype, where, and why.

A dispatch mode is below autograd and autocast, so it sees what really ran. A function mode above them knows the
torch-level call and asks the policy for its reason. Both, and the hooks on modules and optimizers, exist only while at
least one recording is on.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from mezzo._torch.autograd_engine import next_node_number
from mezzo._torch.dispatcher import OpOverload, overload_binding
from mezzo._torch.dynamo import kept_out
from mezzo._torch.modes import UncompiledMode, current_dispatch_mode, current_function_mode, no_torch_function
from mezzo.amp import current_policy, is_operator_name, thread_state
from mezzo.record._kernel_runs import EXCLUDED, KernelListener, KernelOp, KernelRun, Phase, describe_op, find_tensors
from mezzo.record._kernel_times import RANGE
from mezzo.record._locator import Locator, Place, ThreadPlaces
from mezzo.record._operator_stats import OperatorStats
from mezzo.record._torch_calls import Call, describe_call, numbers

NO_AUTO_CAST = "no auto_cast"
UNLISTED = "unlisted: torch's own rule"
GRADIENT = "gradient: follows the dtype of the forward"

_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_is_inference = torch.is_inference_mode_enabled


class Recording:
    """The modes and hooks of one thread; nested recordings share them and only add listeners."""

    def __init__(self) -> None:
        self.listeners: list[KernelListener] = []
        self._wants_times = False
        self._counter: OperatorStats | None = None
        """The only listener, if it only counts."""
        self.locator = Locator()
        self._places, self._nodes, self._locate = self.locator.places, self.locator.nodes, self.locator.locate
        self._ops: dict[int, tuple[KernelOp, Callable[..., Any], list[KernelListener], Any]] = {}
        """By the id of the operator, which this keeps alive; hashing an operator runs Python code."""
        self._dispatch_mode = RecordingMode(self)
        self._function_mode = _FunctionMode(self._places)
        self._installed = ExitStack()

    def install(self) -> None:
        with ExitStack() as stack:
            for handle in (
                nn.modules.module.register_module_forward_pre_hook(self.locator.enter_module),
                nn.modules.module.register_module_forward_hook(self.locator.leave_module, always_call=True),
                register_optimizer_step_pre_hook(self.locator.enter_step),
                register_optimizer_step_post_hook(self.locator.leave_step),
            ):
                stack.callback(handle.remove)
            # Under a dispatch mode Dynamo gives up a frame forever, even a compiled one. So it is disabled meanwhile,
            # if it is loaded.
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

    def add(self, listener: KernelListener) -> None:
        """Add a listener."""
        self._set_listeners([*self.listeners, listener])

    def remove(self, listener: KernelListener) -> None:
        """Remove a listener."""
        self._set_listeners([each for each in self.listeners if each is not listener])

    def _set_listeners(self, listeners: list[KernelListener]) -> None:
        self.listeners, self._ops = listeners, {}  # new objects: an autograd thread may be iterating over the old ones
        self.locator.wants_lines = any(listener.wants_lines for listener in listeners)
        self._wants_times = any(listener.wants_times for listener in listeners)
        self._counter = listeners[0] if len(listeners) == 1 and isinstance(listeners[0], OperatorStats) else None

    # -- what runs

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a kernel and pass it to the listeners. This is the hot path: facts about an operator are cached."""
        op, run, listeners, _ = self._ops.get(id(func)) or self._learn(func)
        with no_torch_function():  # the kernel and reading a dtype are not torch-level calls
            if not listeners:
                out = run(*args, **kwargs)
                if op.range:
                    self.locator.note_range(op.range)
                elif op.has_tensors and next_node_number() - 1 not in self._nodes:
                    place = self._places.current
                    self._locate(place, place.call)  # a view, whose gradient may be recorded
                return out
            if self._wants_times:
                return self._run_timed(op, listeners, func, args, kwargs)
            out = run(*args, **kwargs)
            counter = self._counter
            if counter is None:
                self._show(op, listeners, func, args, kwargs, out, -1, 0.0)
                return out
            place = self._places.current
            call = place.call
            phase, origin = self._locate(place, call)
            name, reason = ("", None) if call is None else (call.name, call.reason)
            if reason is None:
                reason = self._reason(place, call, phase)
            counter.add_kernel(op, args, kwargs, out, phase, origin[0], name, reason)
            return out

    def _learn(self, func: Any) -> tuple[KernelOp, Callable[..., Any], list[KernelListener], Any]:
        op = describe_op(func)
        run = overload_binding(func)
        known = self._ops[id(func)] = (op, run, [listener for listener in self.listeners if listener.wants(op)], func)
        return known

    def _run_timed(
        self, op: KernelOp, listeners: list[KernelListener], func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        number = next(numbers)
        with torch.profiler.record_function(f"{RANGE}{number}"):
            begin = time.perf_counter()
            out = func(*args, **kwargs)
            seconds = time.perf_counter() - begin
        self._show(op, listeners, func, args, kwargs, out, number, seconds)
        return out

    def _show(
        self, op: KernelOp, listeners: list[KernelListener], func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any,
        number: int, seconds: float,
    ) -> None:  # fmt: skip
        place = self._places.current
        call = place.call
        phase, (module, line, forward_op) = self._locate(place, call)
        name, variant, call_number = ("", "", -1) if call is None else (call.name, call.variant, call.number)
        kernel = KernelRun(
            op, func, args, kwargs, out, phase, module, name, self._reason(place, call, phase), line,
            call_number, number, seconds, variant, forward_op if phase == "backward" and not name else "",
        )  # fmt: skip
        for listener in listeners:
            listener.receive(kernel)

    def _reason(self, place: Place, call: Call | None, phase: Phase) -> str:
        """Return why a kernel runs in its dtype: the policy's reason for its torch-level call."""
        if call is None or not call.name:
            return GRADIENT if phase == "backward" else NO_AUTO_CAST if current_policy() is None else UNLISTED
        if call.reason is None:
            call.reason = EXCLUDED if place.is_excluded and call.policy is not None else self._ask(call)
        return call.reason

    def _ask(self, call: Call) -> str:
        """Return the policy's reason for a call."""
        if call.policy is None:
            return NO_AUTO_CAST
        variant = call.variant
        if not is_operator_name(variant):
            return UNLISTED
        values = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        try:
            return call.policy.decide(variant, tuple(map(_dtype_of, find_tensors(values)))).reason
        except ValueError:  # a name that lists accept, but without an operator
            return UNLISTED


class RecordingMode(UncompiledMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._run = recording.run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_inference():  # there composites arrive undecomposed
            with self:
                out = _in_parts(func, args, kwargs or {})
            if out is not NotImplemented:
                return out
        return self._run(func, args, kwargs or {})


def _are_plain(types: Iterable[type]) -> bool:
    return all(each is Tensor or each is nn.Parameter for each in types)


def _in_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the parts of a composite operator; NotImplemented if it has none."""
    return func.decompose(*args, **kwargs) if isinstance(func, OpOverload) else NotImplemented


class _FunctionMode(TorchFunctionMode):
    def __init__(self, places: ThreadPlaces) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch-level call; Python composites of torch run with the mode on, so that their parts are recorded."""
        named = describe_call(func)
        if named.is_plain:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        place = self._places.current
        outer = place.call
        # the policy now, because a kernel of mezzo may turn it off inside; `thread_state` is the faster place
        place.call = Call(func, named, args, kwargs, outer, thread_state.policy or current_policy())
        try:
            # if `outer` is the same call, the composite asks a second time: let it through
            if named.body is None or (outer is not None and outer.func is func) or not _are_plain(types):
                return func(*args, **kwargs)
            with self:
                return named.body(*args, **kwargs)
        finally:
            place.call = outer
