"""The one recorder of the project: which kernel ran in which dtype, where, and by whose decision.

A dispatch mode sits below autograd and autocast, so it sees what really ran. A function mode above them knows the
torch-level call and asks the policy for its reason. Both, and the hooks that tell the module and the optimizer
phase, exist only while at least one recording is on: off, nothing of this file is installed anywhere.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mezzo.amp._ops import OPS
from mezzo.amp._state import current_policy

Phase = Literal["forward", "backward", "optimizer"]
Counts = tuple[int, int, int, int]
"""Calls in float16, bfloat16, float32, anything else."""

NO_AUTO_CAST = "no auto_cast"
UNLISTED = "unlisted: torch's own rule"
GRADIENT = "gradient: follows the dtype of the forward"

_COLUMNS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_OTHER = 3
_NAME_WIDTH = 40

# Not views by their schema, yet they compute nothing: they allocate, or give a tensor another shape or storage.
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "resize_", "set_"}
)
_RANGES = {"profiler::_record_function_enter_new": 1, "profiler::_record_function_exit": -1}
_BACKWARD_CALLS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# The two torch-level spellings that differ from the name users and lists know.
_API_NAMES = {"cross_entropy_loss": "cross_entropy", "rsub": "sub"}

_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


# ---------------------------------------------------------------------------------------------- what was recorded


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Calls of one kernel from one place, by dtype."""

    op: str
    """Kernel without overload: `addmm`; operators outside aten keep their namespace."""
    phase: Phase
    module: str
    """Path below the outermost module that was called; empty for that module itself and outside of any."""
    api_op: str
    """Torch-level call under which the kernel ran (`linear` for `addmm`); empty where the autograd engine ran it."""
    reason: str
    """What the policy says about `api_op` for the dtypes it was called with."""
    fp16: int
    bf16: int
    fp32: int
    other: int


class OperatorStats:
    """What a recording has seen; it can be read while the recording runs and afterwards.

    >>> with collect_operator_stats(print_table=False) as stats:
    ...     _ = torch.ones(2) + torch.ones(2)
    >>> stats.raw()
    {'add': '0,0,1,0', 'ones': '0,0,2,0'}
    """

    def __init__(self, *, include_views: bool = False) -> None:
        self.include_views = include_views
        self._calls: dict[tuple[str, Phase, str, str, str], list[int]] = {}
        self._lock = threading.Lock()  # backward runs in one thread a device

    def _add(self, key: tuple[str, Phase, str, str, str], column: int) -> None:
        with self._lock:
            self._calls.setdefault(key, [0, 0, 0, 0])[column] += 1

    def count(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, *,
        phase: Phase, module: str = "", api_op: str = "", reason: str = "",
    ) -> None:  # fmt: skip
        """Count a call of a dispatcher operator that is known otherwise than by a recording: a node of a graph."""
        op = _describe_op(func)
        if op.has_tensors and (op.computes or self.include_views):
            self._add((op.name, phase, module, api_op, reason), _column(args, kwargs, out))

    @property
    def rows(self) -> list[OperatorRow]:
        """One row per kernel, phase, module, torch-level call and reason, sorted in that order."""
        with self._lock:
            return [OperatorRow(*key, *calls) for key, calls in sorted(self._calls.items())]

    def totals(self) -> dict[str, Counts]:
        """Return the calls of each kernel in float16, bfloat16, float32 and other dtypes, sorted by name."""
        totals: dict[str, Counts] = {}
        for row in self.rows:
            fp16, bf16, fp32, other = totals.get(row.op, (0, 0, 0, 0))
            totals[row.op] = (fp16 + row.fp16, bf16 + row.bf16, fp32 + row.fp32, other + row.other)
        return totals

    def raw(self) -> dict[str, str]:
        """Return the totals as `name -> 'fp16,bf16,fp32,other'`."""
        return {name: ",".join(map(str, calls)) for name, calls in self.totals().items()}

    def to_dict(self) -> dict[str, Any]:
        """Return totals and rows for JSON."""
        totals = {
            name: dict(zip(("fp16", "bf16", "fp32", "other"), c, strict=True)) for name, c in self.totals().items()
        }
        return {"op_count": len(totals), "totals": totals, "rows": [asdict(row) for row in self.rows]}

    def table(self) -> str:
        """Return the operator table: every line has 122 characters, a blank line ends it."""
        # FP32 has no blank after it, as in the table that Paddle prints: scripts match these bytes.
        captions = [f"{c:-^17}" for c in (" FP16 Calls ", " BF16 Calls ", " FP32 Calls", " Other Calls ")]
        totals = self.totals()
        lines = [f"<{' op list ':-^120}>", f"<{' Op Name ':-^40} | {' | '.join(captions)}>"]
        for name, calls in totals.items():
            lines.append(f"  {_shorten(name):<40}" + "".join(f"|  {count:<17}" for count in calls))
        lines.append(f"<{f' op count: {len(totals)} ':-^120}>")
        return "\n".join(lines) + "\n\n"


def _shorten(name: str) -> str:
    """Fit a name into its column by leaving out its middle: attention kernels differ at both ends."""
    half = _NAME_WIDTH // 2 - 1
    return name if len(name) <= _NAME_WIDTH else f"{name[:half]}..{name[-half:]}"


# ------------------------------------------------------------------------------------------- what a recording knows


@dataclass(frozen=True, slots=True)
class _Op:
    """What the recorder needs to know of a dispatcher operator."""

    name: str
    has_tensors: bool
    computes: bool
    range: int
    """+1 opens and -1 closes a profiler range, 0 is any other operator."""


def _describe_op(func: Any) -> _Op:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _Op(name=func.name(), has_tensors=True, computes=True, range=0)
    name = schema.name.removeprefix("aten::")
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None and not a.alias_info.is_write]
    is_view = bool(aliases) and any(r.alias_info is not None for r in schema.returns)
    is_view = is_view or torch.Tag.inplace_view in func.tags or name in _ALLOCATIONS
    return _Op(name=name, has_tensors="Tensor" in str(schema), computes=not is_view, range=_RANGES.get(name, 0))


class _Call:
    """One torch-level call in progress; its name is worked out when a kernel runs under it."""

    __slots__ = ("args", "func", "in_backward", "kwargs", "policy", "reason")
    in_backward: bool

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], outer: "_Call | None") -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.in_backward = func in _BACKWARD_CALLS or (outer is not None and outer.in_backward)
        self.policy = current_policy()  # now: a kernel of ours may switch it off inside
        self.reason: str | None = None

    @property
    def name(self) -> str:
        """Name as users write it: `linear`, `add`, `sub` for `1 - x`; empty for backward, which is no operator."""
        if self.func in _BACKWARD_CALLS:
            return ""
        name = _name_of(self.func)
        if name in ("__get__", "__set__"):  # a property such as `x.mT`
            name = _name_of(self.func.__self__)
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        return _API_NAMES.get(name, name)

    @property
    def variant(self) -> str:
        """What the policy knows the call by: its name, or which of the two things it does (`sum.dim`)."""
        op = OPS.get(self.name)
        if op is None or op.classify is None:
            return self.name
        try:
            return op.classify(self.args, self.kwargs)
        except IndexError:  # written for the arguments of a kernel; a user may give all of them by keyword
            return self.name


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return name.split(".")[0]  # torch.ops.aten.add.Tensor is add.Tensor


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _column(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Return the column of the first floating input, else of the first floating output, else 'other'."""
    for tensor in _tensors((*args, *kwargs.values(), out)):
        if tensor.dtype.is_floating_point:
            return _COLUMNS.get(tensor.dtype, _OTHER)
    return _OTHER


class _Place(threading.local):
    """Where one thread is: torch-level call, modules, optimizer steps. Autograd threads have their own."""

    def __init__(self) -> None:
        self.call: _Call | None = None
        self.modules: list[nn.Module] = []
        self.path: str | None = ""
        self.is_root_named = True
        self.num_ranges = 0
        self.steps: list[int] = []
        """For each optimizer step in progress, how many profiler ranges were open when it began."""


class _Recording:
    """The modes and hooks of one thread, shared by all its recordings: nested ones are only more sinks."""

    def __init__(self) -> None:
        self.sinks: list[OperatorStats] = []
        self._place = _Place()
        self._ops: dict[Any, _Op] = {}
        self._unlisted: set[str] = set()
        self._bodies: dict[Any, Callable[..., Any] | None] = {}
        self._paths: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._dispatch_mode = _DispatchMode(self)
        self._function_mode = _FunctionMode(self)
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
            if "torch._dynamo" in sys.modules:
                # Under a dispatch mode Dynamo gives up a frame for good, be it compiled already. Told to stay out, it
                # comes back afterwards. Not loaded, it has nothing to lose, and loading it takes seconds.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._dispatch_mode)
            stack.enter_context(self._function_mode)
            self._installed = stack.pop_all()

    def uninstall(self) -> None:
        top = (_get_current_dispatch_mode(), _get_current_function_mode())
        for mode, ours in zip(top, (self._dispatch_mode, self._function_mode), strict=True):
            if mode is not ours:
                raise RuntimeError(
                    f"{type(mode).__name__} was entered after the operator statistics and is still on; leave it first"
                )
        self._installed.close()

    # -- what runs

    def call(self, func: Any, types: Iterable[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a torch-level call; Python composites of torch run with the mode on, so that their parts are seen."""
        place = self._place
        outer = place.call
        place.call = _Call(func, args, kwargs, outer)
        try:
            again = outer is not None and outer.func is func  # the composite asks once more: let it through
            if again or not all(t in (Tensor, nn.Parameter) for t in types):
                return func(*args, **kwargs)
            if func not in self._bodies:
                self._bodies[func] = _without_override_check(func)
            body = self._bodies[func]
            if body is None:
                return func(*args, **kwargs)
            with self._function_mode:
                return body(*args, **kwargs)
        finally:
            place.call = outer

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Count a kernel that has run."""
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _describe_op(func)
        if op.range:
            self._note_range(op.range)
        sinks = [sink for sink in self.sinks if op.has_tensors and (op.computes or sink.include_views)]
        if not sinks:
            return
        with torch._C.DisableTorchFunction():  # reading a dtype is no call to record
            call, phase = self._place.call, self._phase()
            key = (op.name, phase, self._path(), call.name if call else "", self._reason(call, phase))
            column = _column(args, kwargs, out)
        for sink in sinks:
            sink._add(key, column)

    def _phase(self) -> Phase:
        place = self._place
        if _graph_task_id() != -1 or (place.call is not None and place.call.in_backward):
            return "backward"
        # a closure may run the model inside of step()
        return "optimizer" if place.steps and not place.modules else "forward"

    def _reason(self, call: _Call | None, phase: Phase) -> str:
        if call is None or not call.name:
            return GRADIENT if phase == "backward" else NO_AUTO_CAST if current_policy() is None else UNLISTED
        if call.reason is None:
            call.reason = self._ask(call)
        return call.reason

    def _ask(self, call: _Call) -> str:
        """Return what the policy says of a call."""
        if call.policy is None:
            return NO_AUTO_CAST
        variant = call.variant
        if variant in self._unlisted:  # the policy looks for the nearest known name, which takes milliseconds
            return UNLISTED
        dtypes = [tensor.dtype for tensor in _tensors((*call.args, *call.kwargs.values()))]
        try:
            return call.policy.decide(variant, dtypes).reason
        except ValueError:
            self._unlisted.add(variant)
            return UNLISTED

    # -- where it runs

    def _path(self) -> str:
        """Return the path of the innermost module that has one."""
        place = self._place
        if place.path is None:
            # In backward (a checkpoint recomputes) the true root is not on the stack: the names of the forward stay.
            if not place.is_root_named and _graph_task_id() == -1:
                self._paths.update((module, path) for path, module in place.modules[0].named_modules())
                place.is_root_named = True
            place.path = next((self._paths[m] for m in reversed(place.modules) if m in self._paths), "")
        return place.path

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        place = self._place
        if not place.modules:
            place.is_root_named = False
        place.modules.append(module)
        place.path = None

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        place = self._place
        for index in range(len(place.modules) - 1, -1, -1):
            if place.modules[index] is module:  # whatever is above it was left by an exception that runs no hooks
                del place.modules[index:]
                break
        place.path = None if place.modules else ""

    def _enter_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._place.steps.append(self._place.num_ranges)

    def _leave_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._place.steps:
            self._place.steps.pop()

    def _note_range(self, change: int) -> None:
        """Follow the profiler ranges: a step that raises runs no post hook, but it does leave the range around it."""
        place = self._place
        place.num_ranges += change
        while place.steps and place.steps[-1] > place.num_ranges:
            place.steps.pop()


class _DispatchMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._recording.note(func, args, kwargs or {}, out)
        return out


class _FunctionMode(TorchFunctionMode):
    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.call(func, types, args, kwargs or {})


def _without_override_check(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that does not ask for overrides of itself, None for any other.

    `F.cross_entropy` and its like first ask whether a mode is on and, if so, hand over to it. Called again from the
    mode, the original would ask for ever with the mode on, and hide its parts with the mode off.
    """
    if not isinstance(func, FunctionType) or not func.__module__.startswith("torch."):
        return None
    checks = {name: _no for name in _OVERRIDE_CHECKS if name in func.__code__.co_names and name in func.__globals__}
    if not checks:
        return None
    copy = FunctionType(
        func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False


# ------------------------------------------------------------------------------------------------- on and off


class _Active(threading.local):
    """The recording of one thread, and what `enable_operator_stats_collection` has started there."""

    recording: _Recording | None = None
    enabled: OperatorStats | None = None


_active = _Active()


def _start(stats: OperatorStats) -> None:
    if _active.recording is None:
        recording = _Recording()
        recording.install()
        _active.recording = recording
    _active.recording.sinks.append(stats)


def _stop(stats: OperatorStats) -> None:
    recording = _active.recording
    assert recording is not None, "a recording is stopped by the thread that started it"
    if recording.sinks == [stats]:
        recording.uninstall()
        _active.recording = None
    recording.sinks.remove(stats)


@contextmanager
def collect_operator_stats(print_table: bool = True, *, include_views: bool = False) -> Iterator[OperatorStats]:
    """Record the kernels that run inside: which operator, in which dtype, where, and why; print the table at the end.

    Counts what the dispatcher really runs, casts (`_to_copy`) included, in the forward, the backward and the optimizer
    step. The dtype of a call is that of its first floating input (of a list: its first floating element), else of its
    output. Recorded is the calling thread with the autograd threads of its backward. Recordings nest; each sees all.
    After an exception nothing is printed and nothing stays installed; what was recorded can still be read.

    Limits: a recorded operator takes some 10 to 25 microseconds more on the host. Dynamo cannot compile under a
    dispatch mode, so code under `torch.compile` runs, and is counted, as eager code meanwhile, in all threads; the
    compiled form is back afterwards (wrap the model before the recording starts; torch itself warns that an
    `OptimizedModule` meets global hooks). Kernels launched without the dispatcher (a Triton kernel that is not a custom
    operator) are not seen. `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` leave their fused inference path
    while any function mode is on. What runs in neither a backward nor an optimizer step counts as `forward`.

    Args:
        print_table: Print `OperatorStats.table()` when the block ends without an exception.
        include_views: Also count operators that compute nothing: views, and allocations such as `empty`.
    """
    stats = OperatorStats(include_views=include_views)
    _start(stats)
    try:
        yield stats
    finally:
        _stop(stats)
    if print_table:
        print(stats.table(), end="")


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
    print(stats.table(), end="")
