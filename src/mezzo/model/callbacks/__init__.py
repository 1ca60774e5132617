"""Callbacks of `mezzo.Model`: progress, checkpoints, learning rates, early stopping."""

from mezzo.model.callbacks._bar import ProgBarLogger
from mezzo.model.callbacks._callback import Callback, CallbackList, LateLogs, Logs
from mezzo.model.callbacks._events import EventWriter
from mezzo.model.callbacks._files import ModelCheckpoint, TensorBoard
from mezzo.model.callbacks._monitor import EarlyStopping, ReduceLROnPlateau
from mezzo.model.callbacks._rates import LRScheduler

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
