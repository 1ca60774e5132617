"""Mean IoU of the high-level API.

N batch, K classes, H height, W width.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from mezzo.errors import unknown_choice
from mezzo.model.metric._confusion import ConfusionMatrix
from mezzo.model.metric._metric import DeviceMetric, as_tensor
from mezzo.model.metric._scores import Absent


class _Pixels(ConfusionMatrix):
    def are_none(self) -> bool:
        """Return whether no pixel counted; waits for the device."""
        num_ignored = self._sums[-2]
        return bool(self._sums.sum() == num_ignored)


class MeanIoU(DeviceMetric[_Pixels]):
    """The mean over the classes of intersection over union, from the pixels of all batches.

    Args:
        num_classes: K; classes are 0 to K-1.
        ignore_index: Pixels with this label do not count.
        name: Name of the result.
        absent: IoU of a class that neither labels nor predictions contain: `one`, as in PaddleSeg,
            or `skip`, which leaves the class out of the mean.

    >>> metric = MeanIoU(2)
    >>> metric.update(torch.tensor([[[0, 1, 1, 1]]]), torch.tensor([[[0, 0, 1, 255]]]))
    >>> metric.accumulate()
    0.5
    """

    def __init__(
        self, num_classes: int, ignore_index: int = 255, name: str = "miou", *, absent: Absent = "one"
    ) -> None:
        ConfusionMatrix(num_classes, "meta")  # checks the number of classes
        if absent not in get_args(Absent):
            raise ValueError(unknown_choice("absent", absent, get_args(Absent)))
        self.num_classes, self.ignore_index, self.absent = num_classes, ignore_index, absent
        self._name = name

    def name(self) -> str:
        """Return the name."""
        return self._name

    def compute(self, pred: Any, label: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return the predicted and the true class of each pixel, on the device.

        Args:
            pred: Logits (N, K, H, W), or classes (N, H, W), integers.
            label: True classes (N, H, W) or (N, 1, H, W), integers.
            rest: Not used.

        Raises:
            ValueError: The logits do not have a channel for each class.
        """
        classes, labels = as_tensor(pred), as_tensor(label)
        if labels.dim() == 4 and labels.shape[1] == 1:
            labels = labels.squeeze(1)
        if classes.is_floating_point():
            if classes.dim() != 4 or classes.shape[1] != self.num_classes:
                raise ValueError(
                    f"pred is {tuple(classes.shape)}, {classes.dtype}; it must be logits (batch, {self.num_classes}, "
                    "height, width), or classes (batch, height, width) as integers"
                )
            classes = classes.argmax(1)
        return classes, labels

    def update(self, pred: Any, label: Any, *rest: Any) -> None:
        """Count a batch. The host does not wait for the device.

        Args:
            pred: Classes, or the logits that `compute` takes.
            label: True classes.
            rest: Not used.

        Raises:
            ValueError: The shapes differ, or one of the two is not integer.
        """
        classes, labels = self.compute(pred, label)
        self._sums_on(classes.device).update(classes, labels)

    def accumulate(self) -> float:
        """Return the mean over all batches; waits for the device. 0.0 if no pixel was counted.

        Raises:
            ValueError: Some pixels had a class that does not exist.
        """
        if self._sums is None or self._sums.are_none():
            return 0.0
        return self._sums.scores(self.absent).mean_iou

    def _new_sums(self, device: torch.device) -> _Pixels:
        return _Pixels(self.num_classes, device, self.ignore_index)
