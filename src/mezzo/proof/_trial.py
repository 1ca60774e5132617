"""A model trained on one batch, in whatever way is to be looked at: level, layout, lists, captured or not."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo import amp
from mezzo.proof._changes import NO_CHANGES, Changes, apply_changes
from mezzo.static import CapturedStep, capture_step


@dataclass(frozen=True, slots=True)
class Task:
    """A model and the one batch it is trained on."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]

    def copied(self, device: torch.device) -> "Task":
        """Return the task with a copy of its model on `device`, so that training leaves the original as it was."""
        model = copy.deepcopy(self.model).to(device)
        return replace(self, model=model, inputs=_to(self.inputs, device), targets=_to(self.targets, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a task is trained."""

    level: str = "O1"
    dtype: str = "float16"
    is_decorated: bool = False
    """Whether weights are half, with masters; at O2 they are in any case."""
    is_captured: bool = False
    """Whether the step is one CUDA graph."""
    learning_rate: float = 1e-3
    changes: Changes = field(default=NO_CHANGES)


class Trainer:
    """One task trained in one way; a disabled auto_cast and GradScaler make float32 and bfloat16 the same loop."""

    def __init__(self, task: Task, setup: Setup) -> None:
        self.task, self.setup = task, setup
        self.model = task.model.train()
        white = apply_changes(self.model, setup.changes).get("custom_white_list")
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=setup.learning_rate)
        is_mixed = setup.level != "O0"
        if is_mixed and (setup.is_decorated or setup.level == "O2"):
            self.model, self.optimizer = amp.decorate(
                models=self.model, optimizers=self.optimizer, level=setup.level, dtype=setup.dtype
            )
        self.policy = amp.Policy.create(setup.level, setup.dtype, white) if is_mixed else None
        self.scaler = amp.GradScaler(enable=is_mixed and setup.dtype == "float16")
        self.losses: list[Tensor] = []
        self._captured: CapturedStep | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass and the loss."""
        return amp.auto_cast(enable=False) if self.policy is None else amp.auto_cast(policy=self.policy)

    def step(self) -> None:
        """Train one step on the task's batch; the loss stays on the device."""
        if self.setup.is_captured:
            self.losses.append(self._replay())
            return
        with self.autocast():
            loss = self.task.loss_fn(self.model(self.task.inputs), self.task.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # a copy: on CUDA a mean loss is a view of the whole unreduced loss, which would stay allocated for each step
        self.losses.append(loss.detach().clone())

    def _replay(self) -> Tensor:
        batch = (self.task.inputs, self.task.targets)
        if self._captured is None:
            self._captured = capture_step(
                self.model, self.task.loss_fn, self.optimizer, batch, scaler=self.scaler, policy=self.policy
            )
        loss: Tensor = self._captured(*batch)
        return loss


def _to(value: Any, device: torch.device) -> Any:
    """Return tensors, also inside lists, tuples and dicts, on `device`; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_to(item, device) for item in value)
    return value
