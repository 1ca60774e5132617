"""The confusion matrix of a segmentation, counted on the device.

N batch, H height, W width, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mezzo._arguments import check_at_least
from mezzo.model.metric._scores import Absent, SegmentationScores
from mezzo.model.metric._sums import Counts

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class ConfusionMatrix(Counts):
    """Counts of pixels by true and predicted class.

    Args:
        num_classes: K; classes are 0 to K-1.
        device: Where predictions and labels are, and where the counts stay.
        ignore_index: Pixels with this label do not count.

    >>> matrix = ConfusionMatrix(2, "cpu")
    >>> matrix.update(torch.tensor([[[0, 1, 1]]]), torch.tensor([[[0, 0, 255]]]))
    >>> matrix.counts.tolist()
    [[1, 1], [0, 0]]
    """

    def __init__(self, num_classes: int, device: torch.device | str, ignore_index: int = 255) -> None:
        check_at_least("num_classes", num_classes)
        # After the K*K counts: one bin for ignored pixels, one for pixels with an invalid class.
        super().__init__(num_classes * num_classes + 2, device)
        self.num_classes = num_classes
        self.ignore_index = ignore_index

    @property
    def counts(self) -> Tensor:
        """The matrix (K, K), int64, on the device; rows are true classes, columns predicted ones."""
        return self._sums[:-2].view(self.num_classes, self.num_classes)

    def update(self, predictions_NHW: Tensor, labels_NHW: Tensor) -> None:
        """Count a batch. The host does not wait for the device.

        Args:
            predictions_NHW: Classes, integers.
            labels_NHW: True classes, integers, same shape.

        Raises:
            ValueError: Shapes differ, or one of the two is not integer.
        """
        self._check(predictions_NHW, labels_NHW)
        self.add_ones(self._bins(predictions_NHW.reshape(-1).long(), labels_NHW.reshape(-1).long()))

    def scores(self, absent: Absent = "one") -> SegmentationScores:
        """Return the scores of what was counted; waits for the device.

        Args:
            absent: See `SegmentationScores.from_counts`.

        Raises:
            ValueError: No pixel was counted, or some had a class that does not exist.
        """
        sums = self._sums.cpu()
        if strays := int(sums[-1]):
            raise ValueError(
                f"{strays} pixels have a prediction or a label outside 0..{self.num_classes - 1} (ignored: "
                f"{self.ignore_index}); check num_classes and the label files"
            )
        return SegmentationScores.from_counts(sums[:-2].view(self.num_classes, self.num_classes), absent)

    def _bins(self, predictions: Tensor, labels: Tensor) -> Tensor:
        classes = self.num_classes
        is_known = (labels >= 0) & (labels < classes) & (predictions >= 0) & (predictions < classes)
        bins = torch.where(is_known, labels * classes + predictions, classes * classes + 1)
        return torch.where(labels == self.ignore_index, classes * classes, bins)

    def _check(self, predictions: Tensor, labels: Tensor) -> None:
        if predictions.shape != labels.shape:
            raise ValueError(
                f"predictions are {tuple(predictions.shape)}, labels {tuple(labels.shape)}; resize the logits to the "
                "labels before taking the class"
            )
        for what, tensor in (("predictions", predictions), ("labels", labels)):
            if tensor.dtype not in _INTEGERS:
                raise ValueError(f"{what} are {tensor.dtype}; give classes as integers, such as logits.argmax(1)")
