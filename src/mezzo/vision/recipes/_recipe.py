"""A complete recipe: network, data, loss, optimizer and schedule, checked and frozen."""

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
    """A training run: network, data, loss, optimizer and schedule."""

    task: TaskName
    model: ModelRecipe
    num_classes: int
    train_data: DataRecipe | None
    val_data: DataRecipe | None
    batch_size: int
    """Batch size of each process."""
    iters: int | None
    """Length of a segmentation run in steps; None for classification."""
    epochs: int | None
    """Length of a classification run in epochs; None for segmentation."""
    optimizer: OptimizerRecipe
    schedule: Schedule
    loss: LossRecipe | None
    """The loss of a segmentation run; None for classification, which uses cross entropy."""
    resolved: dict[str, Any]
    """All settings with defaults as plain data, which a run writes next to its results."""
    ignored: tuple[str, ...] = ()
    """Settings without effect, each as `position: name: reason`; the training prints them."""

    @property
    def train_size(self) -> tuple[int, int]:
        """Height and width of the images that the network is trained on.

        Raises:
            ValueError: No transform of the training images has a fixed size.
        """
        chain = () if self.train_data is None else self.train_data.transforms.on_host
        for transform in reversed(chain):  # the last one decides
            for name in ("crop_size", "target_size", "size"):
                found = getattr(transform, name, None)
                if found is not None:
                    width, height = (found, found) if isinstance(found, int) else found
                    return height, width
        raise ValueError("train_dataset: no transform gives the images a size, as Resize or RandomPaddingCrop do")

    @property
    def pretrained(self) -> str | None:
        """File or URL of weights of the whole network."""
        return self.model.pretrained

    @property
    def backbone_pretrained(self) -> str | None:
        """File or URL of weights of the backbone."""
        return self.model.backbone_pretrained

    def create_model(self) -> nn.Module:
        """Return a new network, without pretrained weights."""
        return self.model.create()

    def create_loss(self) -> nn.Module:
        """Return a new loss of a list of logits and labels."""
        return ClassLoss() if self.loss is None else self.loss.create()
