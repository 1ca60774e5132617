"""Trains a model on one batch: at one level, with changes, eagerly or as one CUDA graph."""

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
    """A model, the batch that it is trained on, and its loss."""

    model: nn.Module
    inputs: Any
    """A tuple of positional arguments, a mapping of named ones, or the only argument."""
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]
    samples: int | None = None
    """Number of samples in the batch; None: unknown."""

    @property
    def batch_size(self) -> int | None:
        """Samples of the batch: `samples`, or the first size of all tensors; None: unknown."""
        return batch_size_of(self.inputs, self.targets) if self.samples is None else self.samples

    @property
    def can_be_captured(self) -> bool:
        """Whether a step can be captured: inputs are positional tensors, the target is a tensor."""
        args, kwargs = arguments_of(self.model, self.inputs)
        return not kwargs and all(isinstance(value, Tensor) for value in (*args, self.targets))

    def copied(self, device: torch.device) -> "Workload":
        """Return copies of model, batch and loss on `device`.

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
                f"the model cannot be copied ({reason}); does it store a result, as in self.last = out?"
            ) from error
        inputs, targets = tree_map(lambda leaf: _fresh(leaf, device), (self.inputs, self.targets))
        is_module = isinstance(self.loss_fn, nn.Module)
        loss_fn = copy.deepcopy(self.loss_fn).to(device) if is_module else self.loss_fn  # type: ignore[attr-defined]
        return Workload(model.to(device), inputs, targets, loss_fn, self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSetup:
    """How to train a workload."""

    level: str = "O1"
    dtype: str = "float16"
    is_decorated: bool = False
    """Whether O1 stores half weights with masters; O2 and O3 always do."""
    is_captured: bool = False
    """Whether the step is one CUDA graph."""
    learning_rate: float = 1e-3
    changes: Changes = field(default=NO_CHANGES)
    fp8: Fp8Recipe | None = None
    """Recipe of O3; None: the default. A device without FP8 products emulates them."""


class Trial:
    """Trains a workload with a setup, and keeps the losses."""

    def __init__(self, workload: Workload, setup: TrialSetup) -> None:
        self.workload, self.setup = workload, setup
        self.model = workload.model
        if not self.model.training:  # otherwise keep the mode of each module: frozen parts stay frozen
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
        # a copy: on CUDA a mean loss is a view of the unreduced loss, which would stay allocated
        self.losses.append(loss.clone())

    def _check(self, loss: Any, before: list[int]) -> None:
        """Raise ValueError if the first step has no usable loss, or changed the batch."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {got}; must return a tensor with one number")
        if _versions(self.workload.inputs, self.workload.targets) != before:
            raise ValueError(
                "the model changes its inputs in place, so every step gets another batch; clone them in forward"
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
    """Return a copy of a tensor on `device`.

    Other objects are moved by their method `to`, if any.
    """
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    return value.to(device) if hasattr(value, "to") else value


def _versions(*values: Any) -> list[int]:
    """Return the version counter of each tensor."""
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
