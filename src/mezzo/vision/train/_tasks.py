"""Classification and segmentation: losses, logged values, and scores of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mezzo.model.metric import ConfusionMatrix, RunningMean, SegmentationScores, TopK, batch_topk
from mezzo.vision.data import DeviceBatch
from mezzo.vision.recipes import Recipe

KS = (1, 5)


class Scores(Protocol):
    """Result of an evaluation."""

    @property
    def best(self) -> float:
        """The number that decides which checkpoint is the best; larger is better."""

    def values(self) -> dict[str, float]:
        """Return the scalars to log."""


class ClassificationScores:
    """Top-k accuracies and the mean loss."""

    def __init__(self, topk: dict[int, float], loss: float, images: int) -> None:
        self.topk, self.loss, self.images = topk, loss, images

    @property
    def best(self) -> float:
        """Top-1."""
        return self.topk[KS[0]]

    def values(self) -> dict[str, float]:
        """Return top-1, top-5 and the loss."""
        return {**{f"top{k}": value for k, value in self.topk.items()}, "loss": self.loss}


class MapScores:
    """Scores of label maps, over all pixels of a data set."""

    def __init__(self, scores: SegmentationScores, images: int) -> None:
        self.scores, self.images = scores, images

    @property
    def best(self) -> float:
        """Mean IoU."""
        return self.scores.mean_iou

    def values(self) -> dict[str, float]:
        """Return mIoU, accuracy, kappa and Dice."""
        scores = self.scores
        return {
            "mIoU": scores.mean_iou,
            "Acc": scores.accuracy,
            "Kappa": scores.kappa,
            "Dice": scores.mean_dice,
        }


class NetworkTask(Protocol):
    """Classification or segmentation."""

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Return the loss, in float32."""

    def watch(self, outputs: Any, labels: Tensor) -> dict[str, Tensor]:
        """Return the values to log for a training batch besides the loss, on the device."""

    def start_evaluation(self) -> None:
        """Reset the measurements."""

    def measure(self, model: nn.Module, batch: DeviceBatch) -> None:
        """Measure a batch, without host synchronisation."""

    def finish_evaluation(self, images: int) -> Scores:
        """Return the scores over all processes, which evaluated `images` images."""


class Classification:
    """One label per image."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._loss = recipe.create_loss().to(device)
        self._device = device

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        loss: Tensor = self._loss(outputs, labels)
        return loss

    def watch(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the top-1 and top-5 accuracy of the batch."""
        fractions = batch_topk(outputs.detach(), labels, KS)
        return {f"top{k}": value for k, value in zip(KS, fractions, strict=True)}

    def start_evaluation(self) -> None:
        """Reset the measurements."""
        self._topk, self._mean = TopK(KS, self._device), RunningMean(self._device)

    def measure(self, model: nn.Module, batch: DeviceBatch) -> None:
        """Count correct classes and sum the loss."""
        logits = model(batch.images)
        self._topk.update(logits, batch.labels)
        self._mean.update(self.loss(logits, batch.labels), batch.labels.shape[0])

    def finish_evaluation(self, images: int) -> ClassificationScores:
        """Return the scores over all processes."""
        self._topk.reduce()
        self._mean.reduce()
        return ClassificationScores(self._topk.scores(), self._mean.value(), images)


class Segmentation:
    """One label per pixel; networks return a list of logits, and evaluation uses the first."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._loss = recipe.create_loss().to(device)
        self._classes, self._device = recipe.num_classes, device

    def loss(self, outputs: list[Tensor], labels: Tensor) -> Tensor:
        """Return the weighted sum of the losses of all heads."""
        loss: Tensor = self._loss(outputs, labels)
        return loss

    def watch(self, outputs: list[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """Return nothing: the documented line shows only the loss."""
        return {}

    def start_evaluation(self) -> None:
        """Reset the measurements."""
        self._confusion = ConfusionMatrix(self._classes, self._device)

    def measure(self, model: nn.Module, batch: DeviceBatch) -> None:
        """Count the pixels of each true and predicted class.

        Logits are resized to the labels first.
        """
        logits = undo_sizes(model(batch.images)[0], batch.undo)
        if logits.shape[2:] != batch.labels.shape[1:]:
            logits = undo_sizes(logits, [("resize", *batch.labels.shape[1:])])
        self._confusion.update(logits.argmax(dim=1), batch.labels)

    def finish_evaluation(self, images: int) -> MapScores:
        """Return the scores over all processes."""
        self._confusion.reduce()
        return MapScores(self._confusion.scores(), images)


def undo_sizes(logits: Tensor, changes: Sequence[tuple[str, int, int]]) -> Tensor:
    """Return logits in the size of the labels: undo the images' size changes in reverse order."""
    for kind, height, width in reversed(changes):
        if kind == "pad":
            logits = logits[:, :, :height, :width]
        else:
            logits = nn.functional.interpolate(
                logits.float(), size=(height, width), mode="bilinear", align_corners=False
            )
    return logits


def make_task(recipe: Recipe, device: torch.device) -> NetworkTask:
    """Return the task of a recipe."""
    return Classification(recipe, device) if recipe.task == "classification" else Segmentation(recipe, device)
