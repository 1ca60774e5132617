"""How good a network is: counted on the device, read once."""

from mezzo.metric._accuracy import Accuracy
from mezzo.metric._auc import Auc
from mezzo.metric._binary import Precision, Recall
from mezzo.metric._confusion import ConfusionMatrix
from mezzo.metric._mean_iou import MeanIoU
from mezzo.metric._metric import Metric
from mezzo.metric._running import RunningMean
from mezzo.metric._scores import SegmentationScores
from mezzo.metric._topk import TopK, batch_topk

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
