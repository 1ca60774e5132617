"""A model trained on one batch, in whatever way is to be looked at: level, layout, lists, captured or not."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.pytree import tree_leaves, tree_map
from mezzo.fp8 import Fp8Recipe, recipe_for
from mezzo.precision import Precision
from mezzo.static import CapturedStep, capture_step
from mezzo.trial._changes import NO_CHANGES, Changes, apply_changes
from mezzo.trial._inputs import arguments_of, batch_size_of


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the one batch it is trained on."""

    model: nn.Module
    inputs: Any
    """What the model is called with; a tuple holds positional arguments, a mapping named ones (`arguments_of`)."""
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]
    samples: int | None = None
    """How many samples the batch was made with; None: not known."""

    @property
    def batch_size(self) -> int | None:
        """Samples of the batch: as it was made, or where all tensors have one first size; None where nothing tells."""
        return batch_size_of(self.inputs, self.targets) if self.samples is None else self.samples

    def copied(self, device: torch.device) -> "Workload":
        """Return the workload with copies of model, batch and loss on `device`, so that training leaves the originals alone.

        Raises:
            ValueError: The model cannot be copied.
        """
        try:
            model = copy.deepcopy(self.model)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the model cannot be copied ({reason}); does it keep a result, as in self.last = out?"
            ) from error
        inputs, targets = tree_map(lambda leaf: _fresh(leaf, device), (self.inputs, self.targets))
        is_module = isinstance(self.loss_fn, nn.Module)
        loss_fn = copy.deepcopy(self.loss_fn).to(device) if is_module else self.loss_fn  # type: ignore[attr-defined]
        return Workload(model.to(device), inputs, targets, loss_fn, self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSetup:
    """How a workload is trained."""

    level: str = "O1"
    dtype: str = "float16"
    is_decorated: bool = False
    """Whether weights are half, with masters; at O2 and O3 they are in any case."""
    is_captured: bool = False
    """Whether the step is one CUDA graph."""
    learning_rate: float = 1e-3
    changes: Changes = field(default=NO_CHANGES)
    fp8: Fp8Recipe | None = None
    """Of O3; None: the usual one. Where the device has no FP8 products they are emulated."""


class Trial:
    """One workload trained in one way."""

    def __init__(self, workload: Workload, setup: TrialSetup) -> None:
        self.workload, self.setup = workload, setup
        self.model = workload.model
        if not self.model.training:  # else each part stays in its own mode: what is frozen stays frozen
            self.model.train()
        white = apply_changes(self.model, setup.changes).get("custom_white_list")
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=setup.learning_rate)
        self.precision = Precision(
            setup.level,
            setup.dtype,
            custom_white_list=white,
            fp8=recipe_for(_device_of(self.model), setup.fp8) if setup.level == "O3" else None,
            half_weights=setup.is_decorated if setup.level == "O1" else None,
        )
        self.precision.prepare(self.model, self.optimizer)
        self.losses: list[Tensor] = []
        self._args, self._kwargs = arguments_of(self.model, workload.inputs)
        self._captured: CapturedStep | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass and the loss."""
        return self.precision.autocast()

    @torch.enable_grad()
    def step(self) -> None:
        """Train one step on the workload's batch; the loss stays on the device."""
        if self.setup.is_captured:
            self.losses.append(self._replay())
            return
        before = None if self.losses else _versions(self.workload.inputs, self.workload.targets)

        def forward() -> tuple[None, Tensor]:
            loss = self.workload.loss_fn(self.model(*self._args, **self._kwargs), self.workload.targets)
            if before is not None:
                self._check(loss, before)
            return None, loss

        _, loss = self.precision.train_step(forward, self.optimizer)
        # a copy: on CUDA a mean loss is a view of the whole unreduced loss, which would stay allocated for each step
        self.losses.append(loss.clone())

    def _check(self, loss: Any, before: list[int]) -> None:
        """Look at the first step: what it gives, and what it did to the batch that all steps share."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {came}; must return a tensor with one number")
        if _versions(self.workload.inputs, self.workload.targets) != before:
            raise ValueError(
                "the model writes into its inputs, so that no step is like the one before; clone them in forward"
            )

    def _replay(self) -> Tensor:
        batch = (*self._args, self.workload.targets)
        if self._captured is None:
            self._captured = capture_step(
                self.model, self.workload.loss_fn, self.optimizer, batch, precision=self.precision
            )
        loss: Tensor = self._captured(*batch)
        return loss


def _device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _fresh(value: Any, device: torch.device) -> Any:
    """Return a copy of a tensor on `device`, of an object that knows how to get there what it gives, else the value."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    return value.to(device) if hasattr(value, "to") else value


def _versions(*values: Any) -> list[int]:
    """Return how often each tensor was written into."""
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
