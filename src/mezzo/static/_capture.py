"""A training step (forward, loss, backward, check, update, scale) captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import GradScaler, Policy, auto_cast
from mezzo.optim import attach, engine_of, master_of

Loss = Callable[[Any, Tensor], Tensor]


class CapturedStep:
    """A step that `capture_step` made. Call it with a batch of the captured shapes; it returns the loss.

    The learning rate and other numbers of `optimizer.param_groups` may change between calls, weights may be edited and
    checkpoints loaded into the model. On a CPU nothing is captured: the same step runs as it is written.
    """

    def __init__(self, step: _Step, batch: Sequence[Tensor]) -> None:
        self._step = step
        self._batch = [tensor.clone() for tensor in batch]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None
        self._plan: Any = None
        self._settings: Any = None
        self._outcome: Any = None

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a CUDA graph."""
        return self._graph is not None

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the true gradients of the last call, before clipping; None without `max_norm`."""
        norm = self._step.grad_norm
        return None if norm is None else norm.clone()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Train one step on a batch; return its loss, on the device.

        Raises:
            ValueError: The batch has other shapes or dtypes than the captured one.
            RuntimeError: Something changed that is built into the captured step.
        """
        self._check(batch)
        if self._graph is None or self._loss is None:
            return self._step.run(batch)
        scaler = self._step.scaler
        if not self._plan.holds() or (scaler is not None and scaler._settings != self._settings):
            raise RuntimeError(
                "something that is built into the captured step changed (the optimizer's state or groups, whether there is "
                "momentum or weight decay, a weight's memory, a setting of the scaler): call capture_step again"
            )
        torch._foreach_copy_(self._batch, list(batch), non_blocking=True)
        self._graph.replay()
        if scaler is not None:
            scaler._note_replay(self._outcome)
        return self._loss.clone()

    def _check(self, batch: Sequence[Tensor]) -> None:
        came = [_describe(tensor) for tensor in batch]
        captured = [_describe(tensor) for tensor in self._batch]
        if came != captured:
            raise ValueError(
                f"the step was captured for {', '.join(captured)}; got {', '.join(came)}: "
                "drop the last, smaller batch, or capture a step for each shape"
            )

    def _capture(self, device: torch.device, warmup_steps: int) -> None:
        step, scaler = self._step, self._step.scaler
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with _gradients_put_aside(step), _random_numbers_kept(device):
            with _rehearsal(step):
                with torch.cuda.stream(stream):
                    for _ in range(warmup_steps):
                        step.run(self._batch)
                torch.cuda.current_stream(device).wait_stream(stream)
            self._plan = engine_of(step.optimizer).last_plan  # its tables are part of the graph
            if self._plan is None:
                raise ValueError(
                    "the step cannot be captured: some parameter or gradient is not float16, bfloat16 or float32, or its "
                    "gradient has another layout"
                )
            with torch.cuda.graph(graph, stream=stream):
                self._loss = step.run(self._batch)
            torch.cuda.current_stream(device).wait_stream(stream)
        if scaler is not None:
            self._settings, self._outcome = scaler._settings, scaler._take_captured()
        self._graph = graph


class _Step:
    """The step as one would write it."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        policy: Policy | None,
        max_norm: float | None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enable() else None
        self.policy, self.max_norm = policy, max_norm
        self.grad_norm: Tensor | None = None

    def run(self, batch: Sequence[Tensor]) -> Tensor:
        *inputs, target = batch
        with nullcontext() if self.policy is None else auto_cast(policy=self.policy):
            loss = self.loss_fn(self.model(*inputs), target)
        if self.scaler is None:
            loss.backward()
            self._step_without_scaler()
        else:
            self.scaler.scale(loss).backward()
            if self.max_norm is not None:
                self.grad_norm = self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    def _step_without_scaler(self) -> None:
        if self.max_norm is not None:
            self.grad_norm = engine_of(self.optimizer).clip_next_step(self.max_norm)
        self.optimizer.step()


@contextmanager
def _gradients_put_aside(step: _Step) -> Iterator[None]:
    """Inside there are no gradients; afterwards parameters that the optimizer does not have get theirs back."""
    steps = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    others = [(p, p.grad) for p in step.model.parameters() if id(p) not in steps]
    step.model.zero_grad(set_to_none=True)
    step.optimizer.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        step.optimizer.zero_grad(set_to_none=True)
        for param, grad in others:
            param.grad = grad


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    on_host, on_device = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(on_host)
        torch.cuda.set_rng_state(on_device, device)


@contextmanager
def _rehearsal(step: _Step) -> Iterator[None]:
    """Inside, steps are taken only to warm up: weights, state, buffers and scale are afterwards what they were."""
    values = [(tensor, tensor.clone()) for tensor in _weights_and_buffers(step)]
    states = {param: _clones(state) for param, state in step.optimizer.state.items()}
    with nullcontext() if step.scaler is None else step.scaler._rehearsal():
        try:
            yield
        finally:
            for tensor, value in values:
                tensor.copy_(value)
            # By key: a step brings loaded state into its own dtype, layout and place. State that was not there is zero,
            # which is how a first step finds it.
            for param, state in step.optimizer.state.items():
                before = states.get(param, {})
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        _set(value.data, before.get(key))


def _clones(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _set(tensor: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor.copy_(value)
    else:
        tensor.fill_(0 if value is None else value)


def _weights_and_buffers(step: _Step) -> list[Tensor]:
    params = [p for group in step.optimizer.param_groups for p in group["params"]]
    weights = {id(p): p for p in (*step.model.parameters(), *params)}.values()
    masters = [m for p in weights if (m := master_of(p)) is not None]
    # As data: what is put back is no edit that a master would have to follow.
    return [tensor.data for tensor in (*weights, *masters, *step.model.buffers())]


def capture_step(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: Optimizer,
    batch: Sequence[Tensor],
    *,
    scaler: GradScaler | None = None,
    policy: Policy | None = None,
    max_norm: float | None = None,
    warmup_steps: int = 3,
) -> CapturedStep:
    """Capture `loss_fn(model(*inputs), target)`, its backward and the optimizer's step in one CUDA graph.

    The host's time per step becomes one launch, whatever the number of layers. Weights, optimizer state, buffers, loss
    scale and random numbers are after the capture as they were before it; gradients are gone. Overflow is handled inside
    the graph: such a step changes nothing but the scale. Hooks of modules and of the optimizer run while the step is
    captured and warmed up, not when it is replayed.

    Args:
        model: On one CUDA device, or on the CPU; decorated or not.
        loss_fn: Gets the model's output and the target.
        optimizer: SGD, Adam or AdamW; others read from the device in their step.
        batch: Inputs of the model and, last, the target: their shapes and dtypes are those of every later batch.
        scaler: For float16.
        policy: From `Policy.create(...)`; None: no auto_cast.
        max_norm: Clip the norm of the true gradients to this.
        warmup_steps: Steps taken before the capture, and taken back.

    Raises:
        ValueError: The optimizer cannot be captured, or the batch is empty or not on the model's device.

    >>> net = nn.Linear(4, 2)
    >>> step = capture_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1),
    ...                     (torch.ones(8, 4), torch.zeros(8, 2)))
    >>> step(torch.ones(8, 4), torch.zeros(8, 2)).shape, step.is_captured
    (torch.Size([]), False)
    """
    device = _device_of(model, batch)
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps={warmup_steps}: must be at least 1; libraries set themselves up in it")
    step = CapturedStep(_Step(model, loss_fn, optimizer, scaler, policy, max_norm), batch)
    if device.type != "cuda":
        attach(optimizer)
        return step
    if not engine_of(optimizer).can_be_captured():
        raise ValueError(
            f"{type(optimizer).__name__} reads from the device in its step, or has an option that does (amsgrad, "
            "dampening at the first step): capture_step takes SGD, Adam and AdamW on CUDA devices where Triton works"
        )
    attach(optimizer)
    step._capture(device, warmup_steps)
    return step


def _device_of(model: nn.Module, batch: Sequence[Tensor]) -> torch.device:
    if len(batch) < 2 or not all(isinstance(tensor, Tensor) for tensor in batch):
        raise ValueError("batch: must be tensors, inputs of the model first, the target last")
    devices = {p.device for p in model.parameters()} | {tensor.device for tensor in batch}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model and batch must be on one device; they are on {names or 'none'}")
    return devices.pop()


def _describe(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
