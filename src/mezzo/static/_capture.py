"""A training step (forward, loss, backward, check, update, scale) captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.cuda_graphs import capture_into
from mezzo._torch.foreach import foreach_copy_
from mezzo.amp import GradScaler, Policy
from mezzo.fp8 import WeightCopies, capture_with_managed_copies, copies_of
from mezzo.optim import attach, engine_of
from mezzo.precision import Precision
from mezzo.static._graph import CaptureError
from mezzo.static._region import CastRules
from mezzo.static._step import (
    Loss,
    TrainingStep,
    check_optimizer,
    describe,
    device_of,
    forward_and_loss,
    modules_of,
    precision_of_step,
)


class CopiesOfWeights:
    """Keeps the FP8 copies of a step's weights valid.

    A replay changes weights, but not their versions.
    """

    def __init__(self, step: TrainingStep, plan: Any) -> None:
        trained = {id(p): p for group in step.optimizer.param_groups for p in group["params"]}
        others = {id(p): p for module in step.modules for p in module.parameters() if id(p) not in trained}
        changing = _with_copies(trained.values())
        self._written = [(param, copies) for param, copies in changing if plan.writes_copies_of(param)]
        self._made_in_graph = [copies for param, copies in changing if not plan.writes_copies_of(param)]
        self._constant = _with_copies(others.values())

    def prepare(self) -> None:
        """Renew the copies that the update writes, so that the graph does not compute them.

        Call it before the capture. The graph computes all other copies.
        """
        for param, copies in self._written:
            copies.renew(param)
        self.forget()

    def forget(self) -> None:
        """Drop the copies that the forward made, which are those of the weights before the update.

        Call it after a capture or a replay.
        """
        for copies in self._made_in_graph:
            copies.forget()

    def follow_edits(self) -> None:
        """Renew copies of edited weights that the optimizer does not train.

        Call it before a replay.
        """
        for param, copies in self._constant:
            if not copies.is_of(param):
                copies.renew(param)


def _with_copies(params: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, WeightCopies]]:
    return [(param, copies) for param in params if (copies := copies_of(param)) is not None]


class CapturedStep:
    """A step made by `capture_step`: call it with a batch; it returns the loss.

    The batch must have the captured shapes.

    Between calls, learning rates and other numbers of `optimizer.param_groups` may change, weights
    may be edited and checkpoints loaded. On a CPU nothing is captured: the same step runs eagerly.
    """

    def __init__(self, step: TrainingStep, batch: Sequence[Tensor]) -> None:
        self.training = step
        """What it runs or captured."""
        self._shapes = [describe(tensor) for tensor in batch]
        self._batch: list[Tensor] = []
        self._modules_hold: Callable[[], bool] = lambda: True
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        """By kind of call (whether it updates the weights): graph, and where it leaves its results."""
        self._plan: Any = None
        self._copies: CopiesOfWeights | None = None
        self._scaling: Any = None
        self._settings: Any = None
        self._outcome: Any = None

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a CUDA graph."""
        return bool(self._graphs)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the true gradients of the last call, before clipping; None without `max_norm`."""
        norm = self.training.grad_norm
        return None if norm is None else norm.clone()

    def __call__(self, *batch: Tensor) -> Any:
        """Train one step on a batch.

        Return its loss, on the device, and the other results of `loss_fn`.

        Raises:
            ValueError: The batch has other shapes or dtypes than the captured one.
            RuntimeError: Something changed that is part of the captured step.
        """
        self._check(batch)
        if self.is_captured and not self.prepare_replay(batch):
            raise RuntimeError(
                "something that is built into the captured step changed (the optimizer's state or groups, whether there is "
                "momentum or weight decay, a weight's memory, the mode of a module, a setting of the scaler): capture it again"
            )
        return unpacked(self.run(batch))

    def run(self, batch: Sequence[Tensor], updates: bool = True) -> tuple[Tensor, ...]:
        """Train one step on a batch of the right shapes.

        A captured step uses the batch of `prepare_replay`.

        Args:
            batch: Inputs of the model, then the target.
            updates: False only adds to the gradients.
        """
        if not self._graphs:
            return self.training.run(batch, updates)
        graph, results = self._graphs[updates]
        window, average = self.training.parts.window, self.training.parts.average
        if window is not None:
            window.use_buffers()
        if average is not None and updates:
            average.prepare_replay()
        graph.replay()
        if self._copies is not None:
            self._copies.forget()
        if average is not None and updates:
            average.note_replay()
        if self._scaling is not None and updates:
            self._scaling.note_replay(self._outcome)
        return tuple(result.clone() for result in results)

    def prepare_replay(self, batch: Sequence[Tensor]) -> bool:
        """Copy a batch into the graph's input memory, and refresh what may change between calls.

        The host checks the step while the device copies.

        Returns:
            Whether everything that is part of the graph is unchanged, so that it can be replayed.
        """
        foreach_copy_(self._batch, list(batch), non_blocking=True)
        are_same = self._scaling is None or self._scaling.settings == self._settings
        if self._copies is not None:
            self._copies.follow_edits()
        return are_same and self._modules_hold() and self._plan.refresh()

    def _check(self, batch: Sequence[Tensor]) -> None:
        came = [describe(tensor) for tensor in batch]
        if came != self._shapes:
            raise ValueError(
                f"the step was captured for {', '.join(self._shapes)}; got {', '.join(came)}: "
                "drop the last, smaller batch, or capture a step for each shape"
            )

    def capture(
        self,
        batch: Sequence[Tensor],
        device: torch.device,
        warmup_steps: int,
        pool: Any = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Warm up on a batch, and capture the step.

        Then restore everything except gradients, which are None.

        Args:
            batch: Inputs of the model, then the target.
            device: The CUDA device of model and batch.
            warmup_steps: Steps before the capture.
            pool: Memory pool that the graph shares with others.
            check: Called between warm-up and capture; raises if the step cannot be captured.

        Raises:
            ValueError: Some parameter or gradient cannot be part of a captured step.
        """
        step = self.training
        processes = step.parts.processes
        self._batch = [tensor.clone() for tensor in batch]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with self._put_aside(device):
            with step.rehearsal():
                self._warm_up(warmup_steps, device, stream)
                check()
            self._plan = engine_of(step.optimizer).last_plan  # its tables are part of the graph
            if self._plan is None:
                raise ValueError(
                    "the step cannot be captured: some parameter or gradient is not float16, bfloat16 or float32, or its "
                    "gradient has another layout"
                )
            self._copies = CopiesOfWeights(step, self._plan)
            self._copies.prepare()
            # NCCL's own thread asks for events, which another mode forbids during a capture.
            mode = "global" if processes is None else "thread_local"
            graphs = {}
            for updates in step.parts.kinds:
                graph = torch.cuda.CUDAGraph()
                with (
                    capture_with_managed_copies(),
                    capture_into(graph, pool=pool, stream=stream, capture_error_mode=mode),
                ):
                    graphs[updates] = graph, self._run_captured(updates)
                torch.cuda.current_stream(device).wait_stream(stream)
                self._copies.forget()
        foreach_copy_(self._batch, list(batch), non_blocking=True)  # the model may have written into it
        if step.scaler is not None:
            self._scaling = step.scaler.captured
            self._settings, self._outcome = self._scaling.settings, self._scaling.take_outcome()
        self._modules_hold = step.module_watch()
        self._graphs = graphs

    def _run_captured(self, updates: bool) -> tuple[Tensor, ...]:
        try:
            return self.training.run(self._batch, updates)
        except RuntimeError as error:
            if "generator not in capture mode" not in str(error):
                raise
            raise CaptureError(
                "the step draws random numbers inside an activation checkpoint, and backend 'aot_eager' cannot capture "
                "that on a GPU; use backend='inductor'"
            ) from error

    @contextmanager
    def _put_aside(self, device: torch.device) -> Iterator[None]:
        """Restore gradients, random numbers and averages afterwards."""
        window, average = self.training.parts.window, self.training.parts.average
        with (
            nullcontext() if window is None else window.put_aside(),
            self.training.gradients_put_aside(),
            random_numbers_kept(device),
            nullcontext() if average is None else average.rehearsal(device),
        ):
            yield

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, calls of a captured step are only tried: what they change is restored."""
        with self._put_aside(self._batch[0].device):
            with self.training.rehearsal():
                yield
            if self._copies is not None:
                self._copies.prepare()  # the update wrote those of its weights

    def _warm_up(self, warmup_steps: int, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Train some steps on a stream; a window leaves its gradients in its buffers, as zeros."""
        step, window = self.training, self.training.parts.window
        with torch.cuda.stream(stream):
            for number in range(warmup_steps):
                for updates in step.parts.kinds:
                    step.run(self._batch, updates)
                    if window is not None and number == 0 and not updates:
                        window.make_buffers()
        torch.cuda.current_stream(device).wait_stream(stream)


def unpacked(results: tuple[Tensor, ...]) -> Any:
    """Return only the loss if there are no other results, otherwise all results."""
    return results[0] if len(results) == 1 else results


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators of the host and of a device."""
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def refuse_what_cannot_be_captured(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer's step waits for the device."""
    if not engine_of(optimizer).can_be_captured():
        raise ValueError(
            f"{type(optimizer).__name__} reads from the device in its step, or has an option that does (amsgrad, "
            "dampening at the first step): a captured step takes SGD, Adam and AdamW on CUDA devices where Triton works"
        )


def check_warmup(warmup_steps: int) -> None:
    """Raise ValueError unless there is at least one warm-up step."""
    if warmup_steps < 1:
        raise ValueError(
            f"warmup_steps={warmup_steps}: must be at least 1, because libraries initialise themselves in this step"
        )


def capture_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    batch: Sequence[Tensor],
    *,
    precision: Precision | None = None,
    scaler: GradScaler | None = None,
    policy: Policy | str | None = None,
    max_norm: float | None = None,
    warmup_steps: int = 3,
) -> CapturedStep:
    """Capture `loss_fn(model(*inputs), target)`, backward and optimizer step in one CUDA graph.

    The host then launches one graph per step, for any number of layers. The capture does not change
    weights, optimizer state, buffers, loss scale and random numbers; it drops gradients. Overflow
    is handled inside the graph: such a step changes only the scale. Hooks of modules and of the
    optimizer run during warm-up and capture, not during a replay.

    Args:
        model: On one CUDA device, or on the CPU; decorated or not.
        loss_fn: Gets the model's output and the target; returns the loss, or a tuple of the loss
            and other tensors.
        optimizer: SGD, Adam or AdamW; others read from the device in their step.
        batch: Inputs of the model and, last, the target. Every later batch must have these shapes
            and dtypes.
        precision: The `mezzo.Precision` that prepared model and optimizer; or give `scaler` and
            `policy`.
        scaler: For float16.
        policy: A level such as `O2`, in the dtype of the model's half weights (float16 if it has
            none), or from `Policy.create(...)`; None: no auto_cast.
        max_norm: Clip the norm of the true gradients to this.
        warmup_steps: Steps before the capture; they are undone.

    Raises:
        ValueError: The optimizer cannot be captured, or the batch is empty or not on the model's
            device.

    >>> net = nn.Linear(4, 2)
    >>> step = capture_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1),
    ...                     (torch.ones(8, 4), torch.zeros(8, 2)))
    >>> step(torch.ones(8, 4), torch.zeros(8, 2)).shape, step.is_captured
    (torch.Size([]), False)
    """
    check_optimizer(optimizer)
    modules = modules_of(model, loss_fn)
    device = device_of(modules, batch)
    check_warmup(warmup_steps)
    compute = forward_and_loss(model, loss_fn)
    precision = precision_of_step(precision, policy, scaler, model)
    step = CapturedStep(
        TrainingStep(compute, modules, optimizer, precision, CastRules(precision.policy), max_norm), batch
    )
    if device.type == "cuda":
        refuse_what_cannot_be_captured(optimizer)
    attach(optimizer)
    if device.type == "cuda":
        step.capture(batch, device, warmup_steps)
    return step
