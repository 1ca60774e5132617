"""The state that `Model.prepare` sets, and the work on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.model._data import as_list, split_batch
from mezzo.model.metric import Metric
from mezzo.model.parallel import World
from mezzo.model.steps import StepResult
from mezzo.model.summary import in_evaluation
from mezzo.model.watchdog import FORWARD_DONE, enter
from mezzo.precision import Precision
from mezzo.record import operator_log
from mezzo.static import CompiledStep

Loss = Callable[..., Any]
Batch = tuple[list[Tensor], list[Tensor]]
"""Inputs and labels, on the device."""


@dataclass(slots=True)
class Prepared:
    """A network with loss, optimizer, metrics and precision."""

    world: World
    network: nn.Module
    """The network without a wrapper; it is saved and evaluated."""
    wrapped: nn.Module
    """The network in its DDP wrapper, for training; with one process the network itself."""
    num_inputs: int
    """How many tensors of a batch are inputs."""
    precision: Precision
    optimizer: Optimizer | None = None
    loss: Loss | None = None
    metrics: Sequence[Metric] = ()
    max_norm: float | None = None
    is_double: bool = False
    """Whether the network computes in float64."""
    sample: list[Tensor] | None = None
    """Inputs of the first two samples of the first batch; an exported file is tested with them."""
    has_updated: bool = True
    """Whether the last batch of training updated the weights."""
    compiled: CompiledStep | None = None
    """The whole step as one program, with `graph=True`."""

    def split(self, batch: Any) -> Batch:
        """Return inputs and labels of a batch, on the device."""
        return split_batch(batch, self.num_inputs, self.world.device, double=self.is_double)

    def need(self, name: str, call: str) -> Any:
        """Return the optimizer or the loss, which a call requires.

        Raises:
            RuntimeError: `prepare` did not receive one.
        """
        value = getattr(self, name)
        if value is None:
            raise RuntimeError(
                f"{call}() needs {'an' if name[0] in 'aeiou' else 'a'} {name}: call prepare({name}=...) first"
            )
        return value

    def train(self, batch: Batch, update: bool = True) -> StepResult:
        """Train on a batch and update the metrics."""
        inputs, labels = batch
        self._remember(inputs)
        if not self.network.training:  # otherwise keep frozen parts, for example batch norms, in evaluation mode
            self.wrapped.train()
        if self.compiled is not None and not (operator_log.is_pending and self.world.size == 1):
            return self._train_compiled(self.compiled, batch, update)

        def forward() -> tuple[Any, Tensor]:
            outputs = self.wrapped(*inputs)
            loss = self._loss_of(outputs, labels)
            enter(FORWARD_DONE)
            return outputs, loss

        optimizer = self.need("optimizer", "train_batch")
        with operator_log.training_step() if operator_log.is_pending else nullcontext():
            outputs, loss = self.precision.train_step(forward, optimizer, max_norm=self.max_norm, update=update)
        self.has_updated = update
        self._update_metrics(outputs, labels)
        return StepResult(loss, {})

    def _train_compiled(self, step: CompiledStep, batch: Batch, update: bool) -> StepResult:
        if not update:
            self.refuse_accumulation()
        inputs, labels = batch
        loss, *outputs = step.run([*inputs, *labels])
        enter(FORWARD_DONE)
        self.has_updated = True
        self._update_metrics(outputs, labels)
        return StepResult(loss, {})

    def refuse_accumulation(self) -> None:
        """Raise ValueError if the step is captured: a call cannot only add to the gradients then."""
        if self.compiled is not None:
            raise ValueError(
                "graph=True trains whole steps, and this call would only add to the gradients: leave "
                "accumulate_grad_batches and update=False out, or prepare with graph=False"
            )

    def loss_module(self) -> nn.Module:
        """Return the loss as a module: loss and, if there are metrics, the outputs that they are computed from.

        A captured step finds the buffers of the loss in it.
        """
        return _LossAndOutputs(self)

    def loss_and_outputs(self, outputs: Any, labels: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the loss and, if there are metrics, the outputs."""
        return self._loss_of(outputs, list(labels)), *(as_list(outputs) if self.metrics else ())

    def measure(self, batch: Batch) -> Tensor | None:
        """Update the metrics with a batch; return its loss, None without a loss function.

        Call it inside `evaluation`.
        """
        inputs, labels = batch
        self._remember(inputs)
        with self.precision.autocast():
            outputs = self.network(*inputs)
            loss = None if self.loss is None else self._loss_of(outputs, labels)
        self._update_metrics(outputs, labels)
        return loss

    def predict(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs; call it inside `evaluation`."""
        self._remember(inputs)
        with self.precision.autocast():
            outputs = as_list(self.network(*inputs))
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"the network returned a {type(output).__name__}: predict() needs tensors, or a list or tuple of them"
                )
        return outputs

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Switch to evaluation mode without gradients; restore each module's mode afterwards."""
        with in_evaluation(self.network), torch.no_grad(), operator_log.paused():
            yield

    def _remember(self, inputs: list[Tensor]) -> None:
        if self.sample is None:
            self.sample = [tensor[:2].clone() if tensor.dim() else tensor.clone() for tensor in inputs]

    def _loss_of(self, outputs: Any, labels: list[Tensor]) -> Tensor:
        assert self.loss is not None
        try:
            losses = as_list(self.loss(*as_list(outputs), *labels))
        except TypeError as error:
            if labels:
                raise
            raise ValueError(f"the batch has no labels, and the loss function fails without them: {error}") from error
        if not losses:
            raise TypeError("the loss function returned an empty list: it must return a tensor, or several")
        for loss in losses:
            if not isinstance(loss, Tensor):
                raise TypeError(f"the loss is a {type(loss).__name__}: it must be a tensor, or several")
            if loss.numel() != 1:
                raise ValueError(f"the loss has shape {list(loss.shape)}: it must be one number; use reduction='mean'")
        first, *others = (loss.reshape(()) for loss in losses)
        total: Tensor = torch.stack([first.float(), *(loss.float() for loss in others)]).sum() if others else first
        return total

    # Metrics

    def metric_names(self) -> list[str]:
        """Return the names of all metric values."""
        return [name for metric in self.metrics for name in as_list(metric.name())]

    def reset_metrics(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics:
            metric.reset()

    def metric_values(self, *, of_all: bool = False) -> dict[str, float]:
        """Return the metric values of this process, or with `of_all` over all processes."""
        values: dict[str, float] = {}
        for metric in self.metrics:
            if of_all:
                metric.reduce()
            values |= dict(zip(as_list(metric.name()), as_list(metric.accumulate()), strict=True))
        return values

    @torch.no_grad()
    def _update_metrics(self, outputs: Any, labels: list[Tensor]) -> None:
        detached = [output.detach() if isinstance(output, Tensor) else output for output in as_list(outputs)]
        for metric in self.metrics:
            metric.update(*as_list(metric.compute(*detached, *labels)))


class _LossAndOutputs(nn.Module):
    """The loss of a captured step."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        self._prepared = prepared
        self.loss = prepared.loss if isinstance(prepared.loss, nn.Module) else None

    def forward(self, outputs: Any, *labels: Tensor) -> tuple[Tensor, ...]:
        return self._prepared.loss_and_outputs(outputs, labels)
