"""Base classes of metrics; most metrics count on the device of the first batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from mezzo.model.metric._sums import DeviceSums


class Metric(ABC):
    """Base class of metrics over many batches, with the methods of `paddle.metric.Metric`.

    Call `update(*compute(outputs, labels))` for every batch (a single result of `compute` is one
    argument), then `reduce()` and `accumulate()`. `reset()` starts again.

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
        """Return the name, or a list with one name per result."""

    @abstractmethod
    def reset(self) -> None:
        """Start again."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add the results of `compute` for a batch."""

    @abstractmethod
    def accumulate(self) -> float | list[float]:
        """Return the result, or a list of results, over all batches since `reset()`."""

    def compute(self, pred: Any, label: Any, *rest: Any) -> Any:
        """Return the arguments of `update`; by default the outputs of the network and the labels."""
        return (pred, label, *rest)

    def reduce(self) -> None:
        """Combine the results of all processes; a further update needs `reset()` first.

        A metric that does not override it keeps the result of its own process, and warns if there
        are several.
        """
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            warnings.warn(
                f"{type(self).__name__} does not define reduce(): its value is that of this process only; define it "
                "to add the counts of all processes",
                stacklevel=2,
            )


S = TypeVar("S", bound=DeviceSums)


class DeviceMetric(Metric, Generic[S]):
    """Base class of metrics that count on the device of the first batch."""

    _sums: S | None = None

    @abstractmethod
    def _new_sums(self, device: torch.device) -> S:
        """Return new sums on a device."""

    def _sums_on(self, device: torch.device) -> S:
        """Return the sums for a batch on this device."""
        if self._sums is None:
            with torch.inference_mode(False):  # created in inference mode, they could not be changed outside it
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
        """Add the counts of all processes, in every process; a further update needs `reset()` first.

        Every process must call it, even one without counts: the others wait for it.
        """
        (self._sums or self._sums_on(_device_of_group())).reduce()


def _device_of_group() -> torch.device:
    """Return the device on which a process without counts joins the reduction."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and "nccl" in distributed.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_tensor(values: Any) -> Tensor:
    """Return a tensor without its gradient, or an array or a list as a tensor on the host."""
    return values.detach() if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
