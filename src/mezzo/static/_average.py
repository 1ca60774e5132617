"""The average of the weights (EMA), updated as a part of a compiled step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mezzo.amp import master_parameters
from mezzo.static._graph import CaptureError


class WeightAverage:
    """A `torch.optim.swa_utils.AveragedModel` that a compiled step updates.

    It follows the float32 masters. As in a plain loop, each step updates it, also one that skipped
    its update because of an overflow.

    Args:
        average: Made from the model after `prepare` or `decorate`.
        model: The model that is trained, without a wrapper.
    """

    def __init__(self, average: Any, model: nn.Module) -> None:
        if not isinstance(average, AveragedModel):
            raise TypeError(
                f"ema: {type(average).__name__} is not a torch.optim.swa_utils.AveragedModel; make one with "
                "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) after the model is prepared"
            )
        mine, theirs = ([tuple(p.shape) for p in of.parameters()] for of in (average.module, model))
        if mine != theirs:
            raise ValueError("ema: its parameters are not those of the model; make it from the model that is trained")
        self._average, self._model = average, model
        self._count: Tensor | None = None
        """On the device: how many updates there were; only for captured steps."""
        self._known = -1
        """The same on the host."""
        self._version = -1
        """Of the average's own counter, when it was last read."""

    @property
    def tensors(self) -> list[Tensor]:
        """What a captured step writes to."""
        return [*self._average.module.parameters(), *self._average.module.buffers()]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are."""
        if self._count is None:
            self._average.update_parameters(self._model)
        else:
            self._update_on_device(self._count)

    # Captured steps. AveragedModel counts on the host, which a CUDA graph cannot do.

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Inside, updates are those of a captured step; afterwards the average is as before.

        Raises:
            ValueError: The average cannot be part of a CUDA graph.
        """
        self._refuse_what_cannot_be_captured(device)
        if self._count is None:
            self._count = torch.ones((), dtype=torch.int64, device=device)
        before = [(tensor, tensor.detach().clone()) for tensor in self.tensors]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self._known = -1

    def _refuse_what_cannot_be_captured(self, device: torch.device) -> None:
        average = self._average
        if any(tensor.device != device for tensor in self.tensors):
            raise ValueError(f"ema: a captured step needs its average on {device}; call .to({str(device)!r}) on it")
        if average.multi_avg_fn is None and average.avg_fn is None:
            raise ValueError(
                "ema: this AveragedModel computes an equal average (SWA), which counts on the host; a captured step takes "
                "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), or update it yourself between steps"
            )
        if type(average).update_parameters is not AveragedModel.update_parameters:
            raise ValueError(
                f"ema: {type(average).__name__} has its own update_parameters, which a captured step cannot call; update it "
                "yourself between steps"
            )

    def _update_on_device(self, count: Tensor) -> None:
        average = self._average
        of_all, of_one = average.multi_avg_fn, average.avg_fn
        averages: list[Tensor] = list(average.module.parameters())
        values = master_parameters(self._model)
        buffers = list(zip(average.module.buffers(), self._model.buffers(), strict=True))
        if average.use_buffers:
            averages += [mine for mine, _ in buffers]
            values += [theirs.to(mine.dtype) for mine, theirs in buffers]
        else:
            for average_of_buffer, buffer in buffers:
                average_of_buffer.copy_(buffer)
        try:
            if of_all is not None:
                for mine, theirs in _by_dtype(averages, values):
                    of_all(mine, theirs, count)
            elif of_one is not None:
                for one, value in zip(averages, values, strict=True):
                    one.detach().copy_(of_one(one.detach(), value, count))
        except RuntimeError as error:
            raise CaptureError(
                f"ema: its function ({_place_of(of_all or of_one)}) cannot be captured: {_first_line(error)}; it must "
                "compute on the device and read nothing on the host, as get_ema_multi_avg_fn does"
            ) from error
        count.add_(1)

    def prepare_replay(self) -> None:
        """Follow a changed counter, such as that of a loaded checkpoint."""
        assert self._count is not None
        counter: Tensor = self._average.n_averaged
        if self._known < 0 or counter._version != self._version:
            self._known = int(counter.item())
            # The graph computes an average in any case; that of the first update is replaced below.
            self._count.fill_(max(self._known, 1))

    def note_replay(self) -> None:
        """Count the update; the first one copies the weights."""
        counter: Tensor = self._average.n_averaged
        if self._known == 0:
            assert self._count is not None
            self._average.update_parameters(self._model)
            self._count.fill_(1)
        else:
            counter.add_(1)
        self._known += 1
        self._version = counter._version


def _by_dtype(averages: list[Any], values: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    found: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for average, value in zip(averages, values, strict=True):
        mine, theirs = found[average.dtype]
        mine.append(average.detach())
        theirs.append(value)
    return list(found.values())


def _place_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return getattr(function, "__name__", "?") if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
