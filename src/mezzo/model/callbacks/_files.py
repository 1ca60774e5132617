"""Callbacks that write: checkpoints, and scalars for TensorBoard."""

from __future__ import annotations

import warnings
from pathlib import Path

from mezzo._arguments import check_at_least
from mezzo.errors import require
from mezzo.model.callbacks._bar import is_shown
from mezzo.model.callbacks._callback import Callback, Logs
from mezzo.model.callbacks._events import EventWriter


class ModelCheckpoint(Callback):
    """Saves the model every few epochs as `SAVE_DIR/EPOCH`, and at the end as `SAVE_DIR/final`.

    Args:
        save_freq: Number of epochs between two checkpoints.
        save_dir: Folder of the checkpoints; None: the `save_dir` of `fit`, or no checkpoints.
    """

    def __init__(self, save_freq: int = 1, save_dir: str | Path | None = None) -> None:
        check_at_least("save_freq", save_freq)
        self._every, self._directory = save_freq, None if save_dir is None else Path(save_dir)

    @property
    def save_dir(self) -> Path | None:
        """The `save_dir` of this callback, not that of `fit`."""
        return self._directory

    @property
    def _target(self) -> Path | None:
        return self._directory if self._directory is not None else self.params["save_dir"]

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save every `save_freq` epochs; epochs are counted from 0."""
        if self._target is not None and (epoch + 1) % self._every == 0:
            self.model.save(self._target / str(epoch))

    def on_train_end(self, logs: Logs) -> None:
        """Save the final model."""
        if self._target is not None:
            self.model.save(self._target / "final")


class TensorBoard(Callback):
    """Writes loss, metrics, learning rate and loss scale for TensorBoard. If it cannot write, it warns and stops writing.

    Args:
        log_dir: Folder of the files.
        log_freq: Number of batches between two points of training.
    """

    def __init__(self, log_dir: str | Path, log_freq: int = 10) -> None:
        check_at_least("log_freq", log_freq)
        require("tensorboard", extra="vision")
        self._directory, self._every = Path(log_dir), log_freq
        self._writer: EventWriter | None = None
        self._steps = 0

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Write a point every `log_freq` batches."""
        self._steps += 1
        if self._steps % self._every == 0:
            optimizer, scaler = self.model.optimizer, self.model.scaler
            more = {"lr": float(optimizer.param_groups[0]["lr"])} if optimizer is not None else {}
            if scaler is not None:
                more["loss_scale"] = scaler.get_scale()
            self._write("train", {**logs, **more})

    def on_eval_end(self, logs: Logs) -> None:
        """Write the result of an evaluation."""
        self._write("eval", logs)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, kind: str, logs: Logs) -> None:
        if not self.model.world.is_first:
            return
        if self._writer is None:
            self._writer = EventWriter(self._directory, notice=lambda line: warnings.warn(line, stacklevel=2))
        for name, value in logs.items():
            if is_shown(name, value):
                self._writer.add(f"{kind}/{name}", float(value), self._steps)
