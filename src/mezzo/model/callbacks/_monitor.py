"""Callbacks that monitor one result: early stopping, and lower learning rates on a plateau."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Literal

from mezzo.errors import unknown_choice
from mezzo.files import say
from mezzo.model.callbacks._callback import Callback, Logs

Direction = Literal["auto", "min", "max"]
_MORE_IS_BETTER = ("acc", "auc", "iou", "precision", "recall", "dice", "f1")


class _Monitor:
    """The best value of a monitored result."""

    def __init__(self, monitor: str, mode: str, min_delta: float) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(unknown_choice("mode", mode, ("auto", "min", "max")))
        is_score = "loss" not in monitor and any(part in monitor for part in _MORE_IS_BETTER)
        grows = is_score if mode == "auto" else mode == "max"
        self.monitor, self._sign, self._delta = monitor, 1 if grows else -1, abs(min_delta)
        self.restart(None)

    def restart(self, baseline: float | None) -> None:
        self.best = baseline if baseline is not None else -self._sign * math.inf

    def update(self, value: float) -> bool:
        """Keep the value if it is the best so far; return whether it is."""
        if not self._sign * (value - self.best) > self._delta:
            return False
        self.best = value
        return True

    def read(self, logs: Logs) -> float:
        if self.monitor not in logs:
            raise ValueError(f"monitor: {unknown_choice('number', self.monitor, list(logs))}")
        return float(logs[self.monitor])


def _check_patience(patience: int) -> int:
    if patience < 0:
        raise ValueError(f"patience={patience}: must be 0 or more")
    return patience


class _EvaluationCallback(Callback, ABC):
    """Base class of callbacks that judge the evaluations of a training."""

    _is_training = False

    def on_train_begin(self, logs: Logs) -> None:
        """Start again."""
        if not self.params.get("evaluates", True):
            warnings.warn(
                f"{type(self).__name__} needs evaluations, and there are none: give fit() eval_data",
                UserWarning,
                stacklevel=5,
            )
        self._is_training = True

    def close(self) -> None:
        """Ignore later evaluations."""
        self._is_training = False

    def on_eval_end(self, logs: Logs) -> None:
        """Judge the result of an evaluation during training."""
        if self._is_training:
            self._judge(logs)

    @abstractmethod
    def _judge(self, logs: Logs) -> None:
        """Judge the result of an evaluation."""


class EarlyStopping(_EvaluationCallback):
    """Ends training when evaluations no longer improve.

    Args:
        monitor: A result of the evaluation: `loss`, or the name of a metric.
        mode: `min`, `max`, or `auto`: `max` for accuracies and similar scores, otherwise `min`.
        patience: Number of evaluations without improvement before training ends.
        verbose: 0 is silent.
        min_delta: Smallest change that counts as an improvement.
        baseline: Value that the first evaluation must improve on.
        save_best_model: Save the best model as `best_model` in the `save_dir` of `fit`.
    """

    def __init__(
        self,
        monitor: str = "loss",
        mode: Direction = "auto",
        patience: int = 0,
        verbose: int = 1,
        min_delta: float = 0.0,
        baseline: float | None = None,
        save_best_model: bool = True,
    ) -> None:
        self._watch, self._patience = _Monitor(monitor, mode, min_delta), _check_patience(patience)
        self._verbose, self._baseline, self._saves = verbose, baseline, save_best_model

    def on_train_begin(self, logs: Logs) -> None:
        """Start again."""
        super().on_train_begin(logs)
        self._watch.restart(self._baseline)
        self._waited, self._epoch = 0, 0

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def _judge(self, logs: Logs) -> None:
        """Save the best model, or stop after `patience` evaluations without improvement."""
        if self._watch.update(self._watch.read(logs)):
            self._waited = 0
            if self._saves and self.params["save_dir"] is not None:
                self.model.save(self.params["save_dir"] / "best_model")
            return
        self._waited += 1
        if self._waited > self._patience:
            self.model.stop_training = True
            if self._verbose and self.model.world.is_first:
                say(
                    f"Epoch {self._epoch + 1}: stopped early, best {self._watch.monitor} {self._watch.best:.4f}",
                )


class ReduceLROnPlateau(_EvaluationCallback):
    """Lowers the learning rate when evaluations no longer improve.

    Args:
        monitor: A result of the evaluation: `loss`, or the name of a metric.
        factor: Multiplier of the learning rate.
        patience: Number of evaluations without improvement before the rate is lowered.
        verbose: 0 is silent.
        mode: `min`, `max`, or `auto`.
        min_delta: Smallest change that counts as an improvement.
        cooldown: Number of evaluations after a change that are ignored.
        min_lr: Lower limit of the rate.
    """

    def __init__(
        self,
        monitor: str = "loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 1,
        mode: Direction = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor={factor}: must be between 0 and 1")
        self._watch, self._patience = _Monitor(monitor, mode, min_delta), _check_patience(patience)
        self._factor, self._verbose, self._rest, self._lowest = factor, verbose, cooldown, min_lr
        self._waited, self._resting = 0, 0

    def on_train_begin(self, logs: Logs) -> None:
        """Start again."""
        super().on_train_begin(logs)
        self._watch.restart(None)
        self._waited, self._resting = 0, 0

    def _judge(self, logs: Logs) -> None:
        """Lower the rate after `patience` evaluations without improvement."""
        is_better = self._watch.update(self._watch.read(logs))
        if is_better or self._resting > 0:
            self._waited, self._resting = 0, max(0, self._resting - 1)
            return
        self._waited += 1
        if self._waited >= self._patience:
            self._lower()
            self._waited, self._resting = 0, self._rest

    def _lower(self) -> None:
        optimizer = self.model.optimizer
        if optimizer is None:
            return
        before = [float(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = min(group["lr"], max(group["lr"] * self._factor, self._lowest))
        has_changed = before != [group["lr"] for group in optimizer.param_groups]
        if has_changed and self._verbose and self.model.world.is_first:
            rates = ", ".join(f"{group['lr']:.3g}" for group in optimizer.param_groups)
            say(f"{self._watch.monitor} no longer improves: learning rate {rates}")
