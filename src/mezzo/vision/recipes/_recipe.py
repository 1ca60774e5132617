"""A run as a whole: network, data, loss, optimizer and schedule, checked and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mezzo.export import TaskName
from mezzo.vision.recipes._data import DataRecipe
from mezzo.vision.recipes._losses import ClassLoss, LossRecipe
from mezzo.vision.recipes._model import ModelRecipe
from mezzo.vision.recipes._optimizers import OptimizerRecipe
from mezzo.vision.recipes._schedules import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is trained, on what, and how."""

    task: TaskName
    model: ModelRecipe
    num_classes: int
    train_data: DataRecipe | None
    val_data: DataRecipe | None
    batch_size: int
    """Of each process."""
    iters: int | None
    """Length of a segmentation run in steps; None if it is counted in epochs."""
    epochs: int | None
    """Length of a classification run; None if it is counted in steps."""
    optimizer: OptimizerRecipe
    schedule: Schedule
    loss: LossRecipe | None
    """The terms of a segmentation loss; None for classification, which has one."""
    resolved: dict[str, Any]
    """Everything that was set, with all defaults, as plain data: what a run writes beside its results."""
    ignored: tuple[str, ...] = ()
    """Settings that have no effect, each as `place: name: why`; whoever runs the recipe shows them."""

    @property
    def pretrained(self) -> str | None:
        """File or address of weights for the whole network."""
        return self.model.pretrained

    @property
    def backbone_pretrained(self) -> str | None:
        """File or address of weights for the backbone."""
        return self.model.backbone_pretrained

    def create_model(self) -> nn.Module:
        """Return a new network, without pretrained weights."""
        return self.model.create()

    def create_loss(self) -> nn.Module:
        """Return a new loss of a list of logits and labels."""
        return ClassLoss() if self.loss is None else self.loss.create()
