"""The base class of callbacks, and the list that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from torch.optim import Optimizer

from mezzo.amp import GradScaler

Mode = Literal["train", "eval", "predict"]
Logs = Mapping[str, Any]


class RunProcess(Protocol):
    """This process among those of a run."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""


class TrainedModel(Protocol):
    """The part of `mezzo.Model` that callbacks use."""

    stop_training: bool

    @property
    def world(self) -> RunProcess:
        """This process among those of a run."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, None before `prepare`."""

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler; None without float16."""

    @property
    def has_updated(self) -> bool:
        """Whether the last batch updated the weights."""

    def save(self, path: str | Path, training: bool = True) -> Path:
        """Write the model."""


class LateLogs(Mapping[str, Any]):
    """Logs that are read from the device on first access, so that a callback that ignores them does not wait."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._values: dict[str, Any] | None = None
        self._is_over = False

    def __enter__(self) -> LateLogs:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # the metrics continue to change

    def _known(self) -> dict[str, Any]:
        if self._values is None:
            if self._is_over:
                raise RuntimeError(
                    "these logs belong to an earlier batch and were not read in time: read them in the callback"
                )
            self._values = self._read()
        return self._values

    def __getitem__(self, key: str) -> Any:
        return self._known()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __repr__(self) -> str:
        return repr(self._known())


class Callback:
    """Called by `Model.fit`, `evaluate` and `predict`; override the methods that you need.

    `self.model` is the model, `self.params` has `epochs`, `steps` (None if unknown), `batch_size`,
    `verbose`, `metrics`, `save_dir`, `evaluates`. Logs contain the loss and the metrics; those of a
    batch are read from the device on first access. Set `self.model.stop_training` to end training
    after the epoch.
    """

    model: TrainedModel
    params: dict[str, Any]

    def set_model(self, model: TrainedModel) -> None:
        """Set the model."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Set the parameters of the run."""
        self.params = params

    def on_train_begin(self, logs: Logs) -> None:
        """Before the first epoch."""

    def on_train_end(self, logs: Logs) -> None:
        """After the last epoch."""

    def close(self) -> None:
        """At the very end, also of a failed run: close bars and files."""

    def on_eval_begin(self, logs: Logs) -> None:
        """Before an evaluation."""

    def on_eval_end(self, logs: Logs) -> None:
        """After an evaluation; `logs` has its loss and metrics."""

    def on_predict_begin(self, logs: Logs) -> None:
        """Before a prediction."""

    def on_predict_end(self, logs: Logs) -> None:
        """After a prediction."""

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        """Before an epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """After an epoch of training, before its evaluation."""

    def on_train_batch_begin(self, step: int, logs: Logs) -> None:
        """Before a batch, counted from 0 in each epoch."""

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch."""

    def on_eval_batch_begin(self, step: int, logs: Logs) -> None:
        """Before a batch of an evaluation."""

    def on_eval_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch of an evaluation."""

    def on_predict_batch_begin(self, step: int, logs: Logs) -> None:
        """Before a batch of a prediction."""

    def on_predict_batch_end(self, step: int, logs: Logs) -> None:
        """After a batch of a prediction."""


class CallbackList:
    """Calls every callback, in order."""

    def __init__(self, callbacks: Iterable[Callback], model: TrainedModel, params: dict[str, Any]) -> None:
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks: a {type(callback).__name__} must be an instance of mezzo.model.callbacks.Callback"
                )
            callback.set_model(model)
            callback.set_params(params)

    def begin(self, mode: Mode, logs: Logs | None = None) -> None:
        """Call the `on_*_begin` of a mode."""
        for callback in self._callbacks:
            getattr(callback, f"on_{mode}_begin")(logs or {})

    def end(self, mode: Mode, logs: Logs | None = None) -> None:
        """Call the `on_*_end` of a mode."""
        for callback in self._callbacks:
            getattr(callback, f"on_{mode}_end")(logs or {})

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close every callback at the end; an error of the run takes precedence over errors of closing."""
        try:
            yield
        except BaseException as error:
            try:
                self.close()
            except Exception as failure:  # noqa: BLE001  the first error is the reason
                error.add_note(f"closing a callback failed too: {failure!r}")
            raise
        self.close()

    def close(self) -> None:
        """Close every callback, then raise the first error."""
        failures = []
        for callback in self._callbacks:
            try:
                callback.close()
            except Exception as error:  # noqa: BLE001  of a user's callback; it is raised when all are closed
                failures.append(error)
        if failures:
            raise failures[0]

    def begin_epoch(self, epoch: int) -> None:
        """Call `on_epoch_begin`."""
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, {})

    def end_epoch(self, epoch: int, logs: Logs) -> None:
        """Call `on_epoch_end`."""
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def begin_batch(self, mode: Mode, step: int) -> None:
        """Call the `on_*_batch_begin` of a mode."""
        for callback in self._callbacks:
            getattr(callback, f"on_{mode}_batch_begin")(step, {})

    def end_batch(self, mode: Mode, step: int, logs: Logs) -> None:
        """Call the `on_*_batch_end` of a mode."""
        for callback in self._callbacks:
            getattr(callback, f"on_{mode}_batch_end")(step, logs)
