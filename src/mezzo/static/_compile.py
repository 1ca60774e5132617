"""`compile_step`: captures and compiles forward, loss and backward, and replays whole steps."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from mezzo.amp import GradScaler, Policy
from mezzo.amp.user_lines import level_of_user
from mezzo.errors import unknown_choice
from mezzo.files import say
from mezzo.fp8 import count_without_history
from mezzo.optim import attach
from mezzo.precision import Precision
from mezzo.record import OperatorStats
from mezzo.static._average import WeightAverage
from mezzo.static._capture import (
    CapturedStep,
    check_warmup,
    random_numbers_kept,
    refuse_what_cannot_be_captured,
    unpacked,
)
from mezzo.static._choice import (
    AS_WRITTEN,
    BACKEND_AS_WRITTEN,
    COMPILED,
    UNDECIDED,
    StepReport,
    decide,
    time_gradients,
    time_replays,
)
from mezzo.static._graph import BACKENDS, Capture, CapturedGraph, CaptureError, CompilerError
from mezzo.static._processes import processes_of
from mezzo.static._progress import build_shown
from mezzo.static._region import CastRules
from mezzo.static._step import (
    Compute,
    Loss,
    StepParts,
    TrainingStep,
    check_optimizer,
    device_of,
    forward_and_loss,
    modules_of,
    precision_of_step,
)
from mezzo.static._window import AccumulationWindow

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AUTO = "auto"

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


class CompiledStep:
    """A step that `compile_step` made. Call it with a batch; it returns the loss.

    Each new shape of a batch is captured once; `max_shapes` of them are kept, the least recently
    used one is dropped first. A shape is one CUDA graph on a CUDA device, a compiled function on
    the CPU.
    """

    def __init__(
        self,
        compute: Compute,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        precision: Precision,
        capture: Capture,
        max_norm: float | None = None,
        max_shapes: int = 8,
        warmup_steps: int = 3,
        smallest_batch: int = 2,
        parts: StepParts | None = None,
        backend: str | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_warmup(warmup_steps)
        if max_shapes < 1:
            raise ValueError(f"max_shapes={max_shapes}: must be at least 1; a step is kept for each shape of a batch")
        self._parts = compute, modules, optimizer, precision, max_norm
        self._capture, self._max_shapes, self._warmup_steps = capture, max_shapes, warmup_steps
        self._steps: OrderedDict[Shapes, CapturedStep] = OrderedDict()
        self._last: CapturedStep | None = None
        self._pool: Any = None
        self._smallest_batch = smallest_batch
        self._extra = parts or StepParts()
        self._report = StepReport()
        self._decide_without_measuring(backend or capture.backend)
        self._is_connected = False

    def _decide_without_measuring(self, asked: str) -> None:
        """Note the form of the step, unless the first batch decides."""
        report, usable = self._report, self._capture.backend
        if asked == AUTO and usable == "inductor" and self._extra.processes is None:
            return
        report.backend = BACKEND_AS_WRITTEN if asked == BACKEND_AS_WRITTEN else usable
        report.chosen = AS_WRITTEN if usable == "eager" else COMPILED
        report.reason = f"its backend is {report.backend!r}"
        if asked == AUTO and self._extra.processes is not None:
            report.reason += "; processes do not measure, because all of them must run the same form"

    @property
    def is_captured(self) -> bool:
        """Whether the last call replayed a CUDA graph."""
        return self._last is not None and self._last.is_captured

    @property
    def num_shapes(self) -> int:
        """How many shapes of a batch are kept."""
        return len(self._steps)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the true gradients of the last call, before clipping; None without `max_norm`."""
        return None if self._last is None else self._last.grad_norm

    @property
    def pending(self) -> int:
        """With `accumulate`: how many calls have added to the gradients since the last update."""
        return 0 if self._extra.window is None else self._extra.window.pending

    def drop_pending(self) -> None:
        """Drop the gradients since the last update; the next call begins a new window."""
        if self._extra.window is not None:
            self._extra.window.drop()

    def __call__(self, *batch: Tensor) -> Any:
        """Train one step on a batch.

        Return its loss, on the device, and other results of the loss function. With `accumulate`
        the loss is that of this call, not divided.

        Raises:
            ValueError: The batch is not on the model's device, or the optimizer cannot be part of a
                CUDA graph.
            CaptureError: The step cannot be captured as one graph; the message names the line.
        """
        return unpacked(self.run(batch))

    def run(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Train one step; return the loss and the other results as a tuple."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in batch) if _are_tensors(batch) else ()
        step = self._steps.get(shapes)
        if step is None or (step.is_captured and not step.prepare_replay(batch)):
            self._steps.pop(shapes, None)  # free its device memory for the new one
            known = None if step is None else step.training.compute
            with build_shown(self._what_is_built(batch) if known is None else None):
                return self._first_run(shapes, batch, known)
        self._steps.move_to_end(shapes)
        return self._run(step, batch)

    def _first_run(self, shapes: Any, batch: Sequence[Tensor], known: Compute | None) -> tuple[Tensor, ...]:
        """Build the step of a new shape and run it.

        The first call of a model may do what cannot be captured: transformers installs hooks under a
        lock. So if the very first capture fails, the step runs once as written and is captured again.
        """
        is_first = self._last is None
        try:
            return self._build_and_run(shapes, batch, known)
        except CaptureError:
            if not is_first:
                raise
        self._steps.pop(shapes, None)
        self._last = None
        device = device_of(self._parts[1], batch, self._smallest_batch)
        self._rehearse(batch, device, lambda step, own: step.differentiate(own))
        return self._build_and_run(shapes, batch, known)

    def _build_and_run(self, shapes: Any, batch: Sequence[Tensor], known: Compute | None) -> tuple[Tensor, ...]:
        step = self._new(batch, known)
        while len(self._steps) >= self._max_shapes:
            self._steps.popitem(last=False)
        self._steps[shapes] = step
        return self._run(step, batch)  # on a CPU the first run compiles

    def _run(self, step: CapturedStep, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._last = step
        window = self._extra.window
        if window is None:
            return step.run(batch)
        results = step.run(batch, window.updates_next)
        window.note_call()
        return results

    def _what_is_built(self, batch: Sequence[Any]) -> str | None:
        """Return what the user sees while a new shape is built; None if nothing is compiled or captured."""
        report = self._report
        if report.chosen == UNDECIDED:
            return "compiling and measuring the training step"
        if report.chosen == COMPILED and report.backend == "inductor":
            return "compiling the training step"
        is_on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in batch)
        captures = report.backend == "aot_eager" or (is_on_gpu and report.backend != "eager")
        return "capturing the training step" if captures else None

    def _new(self, batch: Sequence[Tensor], known: Compute | None) -> CapturedStep:
        """Return the step of a new shape; `known` is what computed its loss before, if anything did."""
        compute, modules, optimizer, _, _ = self._parts
        device = device_of(modules, batch, self._smallest_batch)
        is_captured = self._captures_on(device)
        if is_captured:
            refuse_what_cannot_be_captured(optimizer)
        attach(optimizer)
        if known is None and self._report.chosen == AS_WRITTEN and self._capture.backend != "eager":
            known = compute  # the first batch chose it, after a check of the compiled form
        start = time.perf_counter()
        self._report.device = str(device)
        measures = known is None and self._report.chosen == UNDECIDED
        if known is None:
            self._learn_scales(batch, device)
        known = known or self._captured(compute)
        step = self._choose(batch, device) if measures else self._build(known, batch, device)
        if not self._report.build_s and (measures or is_captured):  # otherwise the first run compiles
            self._report.build_s = time.perf_counter() - start
        if not is_captured and not self.pending:
            optimizer.zero_grad(set_to_none=True)  # as after a capture
        return step

    def _learn_scales(self, batch: Sequence[Tensor], device: torch.device) -> None:
        """With delayed scaling of FP8, run forward and backward once as written: compiled code needs first scales."""
        policy = self._capture.precision.policy
        is_delayed = policy is not None and policy.fp8 is not None and policy.fp8.scaling == "delayed"
        is_plain = self._extra.window is None and self._extra.processes is None
        if self._capture.knows_scales or not (is_delayed and is_plain and self._capture.backend == "inductor"):
            return
        before = count_without_history()
        self._rehearse(batch, device, lambda step, own: step.run(own, updates=False))
        self._capture.knows_scales = count_without_history() == before

    def _rehearse(
        self, batch: Sequence[Tensor], device: torch.device, run: Callable[[TrainingStep, Sequence[Tensor]], object]
    ) -> None:
        """Run the step as written on a copy of a batch; what it changes is restored."""
        compute, modules, optimizer, precision, max_norm = self._parts
        own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch]
        step = TrainingStep(compute, modules, optimizer, precision, self._capture.precision, max_norm, self._extra)
        with step.gradients_put_aside(), step.rehearsal(), random_numbers_kept(device):
            run(step, own)

    def _captured(self, compute: Compute) -> Compute:
        """Return `compute` captured, anew for each set of trained weights.

        Compiled code of torch 2.11 does not notice that a frozen weight is trained again.
        """
        params = [param for module in self._parts[1] for param in module.parameters()]
        forms: dict[tuple[bool, ...], Compute] = {}

        def call(*batch: Tensor) -> tuple[Tensor, ...]:
            trained = tuple([param.requires_grad for param in params])
            if trained not in forms:
                if forms:
                    self._capture.knows_scales = False  # a weight that is trained only now has no FP8 scale yet
                forms[trained] = self._capture.compile(compute)
            return forms[trained](*batch)

        return call

    def _captures_on(self, device: torch.device) -> bool:
        """Whether the step is one CUDA graph."""
        return device.type == "cuda" and self._report.backend != "eager"

    def _build(self, compute: Compute, batch: Sequence[Tensor], device: torch.device) -> CapturedStep:
        """Return a step; on a GPU it is captured."""
        _, modules, optimizer, precision, max_norm = self._parts
        rules = self._capture.precision
        step = CapturedStep(TrainingStep(compute, modules, optimizer, precision, rules, max_norm, self._extra), batch)
        if self._captures_on(device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            if self._extra.processes is not None and not self._is_connected:
                self._extra.processes.connect()
                self._is_connected = True
            step.capture(batch, device, self._warmup_steps, self._pool, self._check_last_graph)
        return step

    def _choose(self, batch: Sequence[Tensor], device: torch.device) -> CapturedStep:
        """Build the step compiled and as written, measure both, and return the faster one."""
        report, compute = self._report, self._parts[0]
        try:
            compiled = self._build(self._captured(compute), batch, device)
            if not compiled.is_captured:
                written = self._build(compute, batch, device)
                times = time_gradients(compiled.training, written.training, batch, device)
                return self._faster(compiled, written, times)
            compiled_s = time_replays(compiled, batch, device)
        except CompilerError as error:
            report.chosen, report.backend, report.reason = AS_WRITTEN, BACKEND_AS_WRITTEN, str(error)
            warnings.warn(f"{error}; the step runs as written", UserWarning, stacklevel=level_of_user())
            return self._build(compute, batch, device)
        try:
            written = self._build(compute, batch, device)
        except (RuntimeError, CaptureError) as error:
            # Eager code may do what a capture forbids, such as a checkpoint that reads the generator's state.
            report.chosen, report.backend = COMPILED, self._capture.backend
            report.reason = f"the step as written cannot be captured ({(str(error).splitlines() or [''])[0]})"
            self._pool = None  # that of a failed capture keeps the memory that the capture had taken
            return self._build(compiled.training.compute, batch, device)
        return self._faster(compiled, written, (compiled_s, time_replays(written, batch, device)))

    def _faster(self, compiled: CapturedStep, written: CapturedStep, times: tuple[float, float]) -> CapturedStep:
        self._report.seconds = {AS_WRITTEN: times[1], COMPILED: times[0]}
        decide(self._report)
        return compiled if self._report.chosen == COMPILED else written

    def report(self) -> StepReport:
        """Return which form of the step runs and why; `print(step.report())` shows it."""
        return self._report

    def _check_last_graph(self) -> None:
        if self.graphs:
            self.graphs[-1].refuse_reads_on_host()

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The captured graphs, one per new shape."""
        return list(self._capture.graphs)

    def operators(self, include_views: bool = False) -> OperatorStats:
        """Return the operator table of the last captured graph: operators and their dtypes.

        Raises:
            RuntimeError: Nothing is captured yet, or backend is 'eager' or 'as_written'.
        """
        return self._graph().operators(include_views)

    def print(self) -> None:
        """Print the last captured graph, forward and backward, casts included."""
        say(self._graph())

    def _graph(self) -> CapturedGraph:
        if not self.graphs:
            raise RuntimeError(
                "no graph was captured yet: run the step once, with another backend than 'eager' and 'as_written', then ask "
                "again"
            )
        return self.graphs[-1]


def _are_tensors(batch: Sequence[Any]) -> bool:
    return all(isinstance(tensor, Tensor) for tensor in batch)


def compile_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    *,
    precision: Precision | None = None,
    scaler: GradScaler | None = None,
    policy: Policy | str | None = None,
    use_fp16_guard: bool = False,
    max_norm: float | None = None,
    backend: str = "auto",
    max_shapes: int = 8,
    warmup_steps: int = 3,
    accumulate: int = 1,
    ema: AveragedModel | None = None,
    process_group: ProcessGroup | None = None,
    num_inputs: int | None = None,
    saves_memory: bool = False,
) -> CompiledStep:
    """Compile `loss_fn(model(*inputs), target)`, backward and optimizer step into one program.

    The policy decides the casts while the step is captured, by its rules for eager mode; redundant
    casts are removed. The capture does not change weights, optimizer state, buffers, loss scale and
    random numbers.

    Args:
        model: On one CUDA device, or on the CPU; decorated or not.
        loss_fn: Gets the model's output and the target; returns the loss, or a tuple of the loss
            and other tensors.
        optimizer: SGD, Adam or AdamW on a CUDA device; on the CPU any that needs no closure (all of torch's
            but LBFGS).
        precision: The `mezzo.Precision` that prepared model and optimizer; or give `scaler` and
            `policy`.
        scaler: For float16.
        policy: A level such as `O2`, in the dtype of the model's half weights (float16 if it has
            none), or from `Policy.create(...)`; None: no auto_cast.
        use_fp16_guard: Only what runs inside `mezzo.static.amp.fp16_guard()` follows the policy.
        max_norm: Clip the norm of the true gradients to this.
        backend: `auto` measures the step compiled by Inductor and as written at the first batch,
            and keeps the faster one (`step.report()`); if the compiler fails, it warns and keeps
            the step as written. Hooks and counters of the model see these trials. Another run may
            choose the other form: give `step.report().backend` to repeat a run bit for bit.
            `inductor` fuses operators; `aot_eager` runs the captured graph without compiling it;
            `as_written` runs the step without a compiler, on a GPU as one CUDA graph; `eager`
            captures nothing, so that breakpoints and prints in the model work.
        max_shapes: How many shapes of a batch are kept.
        warmup_steps: On CUDA: steps before the capture; they are undone.
        accumulate: So many calls make one update: each call adds the gradients of its loss, divided
            by this number, and the last one updates.
        ema: Updated in each step that updates the weights, from the float32 masters.
        process_group: The processes that train this model together: gradients are averaged over
            them, and buffers are those of the first process. A model in `DistributedDataParallel`
            brings its own group; on a GPU give the network itself instead.
        num_inputs: How many tensors of a batch are inputs of the model; the others are targets,
            which `loss_fn` gets after the output. None: all but the last.
        saves_memory: The backward pass computes norms and activation functions again, from tensors
            that are kept anyway, instead of keeping their results too. Only compiled code does
            this: `auto` does not try the step as written.

    >>> net = nn.Linear(4, 2)
    >>> step = compile_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), backend="aot_eager")
    >>> step(torch.ones(8, 4), torch.zeros(8, 2)).dtype
    torch.float32
    >>> step.operators().totals()["addmm"]
    (0, 0, 1, 0)
    """
    check_optimizer(optimizer)
    if backend not in (known := (AUTO, *BACKENDS, BACKEND_AS_WRITTEN)):
        raise ValueError(unknown_choice("backend", backend, known))
    if saves_memory:
        if backend not in (AUTO, "inductor"):
            raise ValueError(f"saves_memory=True needs compiled code: backend={backend!r} must be 'auto' or 'inductor'")
        backend = "inductor"
    precision = precision_of_step(precision, policy, scaler, model)
    rules = CastRules(precision.policy, use_fp16_guard)
    capture = Capture(rules, {AUTO: "inductor", BACKEND_AS_WRITTEN: "eager"}.get(backend, backend))
    capture.saves_memory = saves_memory
    if saves_memory and capture.backend != "inductor":
        warnings.warn(
            "saves_memory=True has no effect: it needs compiled code, and there is no C++ compiler",
            UserWarning,
            stacklevel=level_of_user(),
        )
    window = AccumulationWindow(accumulate, optimizer)
    model, processes = processes_of(model, process_group)
    average = None if ema is None else WeightAverage(ema, model)
    parts = StepParts(window if window.size > 1 else None, processes, average)
    if num_inputs is not None and (isinstance(num_inputs, bool) or not isinstance(num_inputs, int) or num_inputs < 1):
        raise ValueError(
            f"num_inputs={num_inputs!r}: must be a whole number of at least 1, or None for all but the last"
        )
    compute = forward_and_loss(model, loss_fn, num_inputs)
    return CompiledStep(
        compute,
        modules_of(model, loss_fn),
        optimizer,
        precision,
        capture,
        max_norm,
        max_shapes,
        warmup_steps,
        2 if num_inputs is None else num_inputs,
        parts,
        backend=backend,
    )
