"""What a metric of the high-level API is, and how most of them count: on the device of the first batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from mezzo.model.metric._sums import DeviceSums


class Metric(ABC):
    """A measure of a network over many batches, with the methods of Paddle's class of this name.

    For every batch `update(*compute(outputs, labels))` (a single result of `compute` is one argument), after the last
    one `reduce()`, then `accumulate()`. `reset()` starts again.

    >>> class Largest(Metric):
    ...     def name(self) -> str:
    ...         return "largest"
    ...
    ...     def reset(self) -> None:
    ...         self.value = 0.0
    ...
    ...     def update(self, pred: Tensor, label: Tensor) -> None:
    ...         self.value = max(self.value, float(pred.max()))
    ...
    ...     def accumulate(self) -> float:
    ...         return self.value
    >>> metric = Largest()
    >>> metric.reset()
    >>> metric.update(*metric.compute(torch.tensor([1.0, 3.0]), torch.tensor([0, 1])))
    >>> metric.accumulate()
    3.0
    """

    @abstractmethod
    def name(self) -> str | list[str]:
        """Return the name, or a list with a name for each number."""

    @abstractmethod
    def reset(self) -> None:
        """Start again from nothing."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Count a batch: what `compute` returned."""

    @abstractmethod
    def accumulate(self) -> float | list[float]:
        """Return the number, or a list of them, over all batches since `reset()`."""

    def compute(self, pred: Any, label: Any, *rest: Any) -> Any:
        """Return what `update` takes: here the network's output and the labels as they came."""
        return (pred, label, *rest)

    def reduce(self) -> None:
        """Make the number that of all processes together; a further update needs `reset()` first.

        A metric that does not define it keeps the number of its own process, and says so where there are several.
        """
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            warnings.warn(
                f"{type(self).__name__} does not define reduce(): its value is that of this process alone; define it "
                "to sum up what was counted over all processes",
                stacklevel=2,
            )


S = TypeVar("S", bound=DeviceSums)


class DeviceMetric(Metric, Generic[S]):
    """Base of the metrics that count on the device: where the first tensors of a round are."""

    _sums: S | None = None

    @abstractmethod
    def _new_sums(self, device: torch.device) -> S:
        """Return zeros on a device."""

    def _sums_on(self, device: torch.device) -> S:
        """Return what a batch on this device is added to."""
        if self._sums is None:
            with torch.inference_mode(False):  # made inside, they could not be added to outside
                self._sums = self._new_sums(device)
        if self._sums.device != device:
            raise ValueError(
                f"{type(self).__name__} counts on {self._sums.device}, this batch is on {device}; move it there, or call "
                "reset() first"
            )
        return self._sums

    def reset(self) -> None:
        """Start again from zero, on the device of the next batch."""
        self._sums = None

    def reduce(self) -> None:
        """Add up the counts of all processes, in every process; a further update needs `reset()` first.

        Also a process that counted nothing has to call it: the others wait for it.
        """
        (self._sums or self._sums_on(_device_of_group())).reduce()


def _device_of_group() -> torch.device:
    """Return where a process that has no counts takes part in the sum of those that do."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and "nccl" in distributed.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_tensor(values: Any) -> Tensor:
    """Return a tensor without its gradient, or an array or a list as a tensor on the host."""
    return values.detach() if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
