"""What may happen around the steps of `mezzo.Model`: bars, checkpoints, learning rates, an early end."""

from mezzo.callbacks._bar import ProgBarLogger
from mezzo.callbacks._callback import Callback, CallbackList, LateLogs, Logs
from mezzo.callbacks._events import EventWriter
from mezzo.callbacks._files import ModelCheckpoint, TensorBoard
from mezzo.callbacks._monitor import EarlyStopping, ReduceLROnPlateau
from mezzo.callbacks._rates import LRScheduler

__all__ = [
    "Callback",
    "CallbackList",
    "LateLogs",
    "Logs",
    "ProgBarLogger",
    "ModelCheckpoint",
    "EarlyStopping",
    "LRScheduler",
    "ReduceLROnPlateau",
    "TensorBoard",
    "EventWriter",
]
