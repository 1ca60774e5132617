"""How good a network is: counted on the device, read once."""

from mezzo.metric._confusion import ConfusionMatrix
from mezzo.metric._running import RunningMean
from mezzo.metric._scores import SegmentationScores
from mezzo.metric._topk import TopK, batch_topk

__all__ = ["ConfusionMatrix", "SegmentationScores", "TopK", "batch_topk", "RunningMean"]
