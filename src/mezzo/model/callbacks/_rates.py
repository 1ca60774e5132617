"""Learning rates by a torch scheduler."""

from __future__ import annotations

from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mezzo._torch.optimizers import STEP_WAS_CALLED
from mezzo.model.callbacks._callback import Callback, Logs


class LRScheduler(Callback):
    """Steps a scheduler of `torch.optim.lr_scheduler` after every update of the weights, or after every epoch.

    Args:
        scheduler: Of the optimizer that is passed to `prepare`.
        by_step: After every update.
        by_epoch: After every epoch.
    """

    def __init__(self, scheduler: TorchScheduler, by_step: bool = True, by_epoch: bool = False) -> None:
        if by_step == by_epoch:
            raise ValueError(f"by_step={by_step} and by_epoch={by_epoch}: exactly one of the two must be True")
        if not isinstance(scheduler, TorchScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"the scheduler is a {type(scheduler).__name__}: must be one of torch.optim.lr_scheduler that steps without a "
                "value; for plateaus use mezzo.model.callbacks.ReduceLROnPlateau"
            )
        self._scheduler, self._by_step = scheduler, by_step

    def on_train_begin(self, logs: Logs) -> None:
        """Check that the scheduler belongs to the optimizer that trains."""
        if self._scheduler.optimizer is not self.model.optimizer:
            raise ValueError("LRScheduler: the scheduler belongs to another optimizer than prepare() got")
        # torch warns about a wrong order unless optimizer.step was called; a step of the scaler
        # counts too.
        setattr(self._scheduler.optimizer, STEP_WAS_CALLED, True)

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        """Step, if the weights were updated."""
        if self._by_step and self.model.has_updated:
            self._scheduler.step()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Step after every epoch, if asked for."""
        if not self._by_step:
            self._scheduler.step()
