"""Metrics that count on the device and wait for it only when they are read."""

from mezzo.model.metric._accuracy import Accuracy
from mezzo.model.metric._auc import Auc
from mezzo.model.metric._binary import Precision, Recall
from mezzo.model.metric._confusion import ConfusionMatrix
from mezzo.model.metric._mean_iou import MeanIoU
from mezzo.model.metric._metric import Metric
from mezzo.model.metric._running import RunningMean
from mezzo.model.metric._scores import SegmentationScores
from mezzo.model.metric._topk import TopK, batch_topk

__all__ = [
    "Metric",
    "Accuracy",
    "Precision",
    "Recall",
    "Auc",
    "MeanIoU",
    "ConfusionMatrix",
    "SegmentationScores",
    "TopK",
    "batch_topk",
    "RunningMean",
]
