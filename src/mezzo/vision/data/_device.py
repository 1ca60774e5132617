"""Batches on the device: images are copied as uint8 and normalised there, while the previous step runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mezzo.vision.data._loader import HostBatch
from mezzo.vision.data.transforms import Normalize


@dataclass(slots=True)
class DeviceBatch:
    """The input of a network: `images` (n, 3, h, w) float32, labels, and the paths of the files."""

    images: Tensor
    labels: Tensor
    paths: list[str]
    undo: tuple[tuple[str, int, int], ...] = ()
    """See `Sample.undo`."""


class ToInput:
    """Converts uint8 images into network inputs.

    Args:
        normalize: Mean and standard deviation; None leaves values at 0..255.
        device: Device of the inputs.
        channels_last: Keep the memory layout of the images.
    """

    def __init__(self, normalize: Normalize | None, device: torch.device, *, channels_last: bool = True) -> None:
        self._channels_last = channels_last
        self._factor, self._offset = torch.ones(3, 1, 1, device=device), torch.zeros(3, 1, 1, device=device)
        if normalize is not None:
            mean = torch.tensor(normalize.mean, dtype=torch.float64).view(3, 1, 1)
            std = torch.tensor(normalize.std, dtype=torch.float64).view(3, 1, 1)
            self._factor = (1 / (255 * std)).to(device, torch.float32)
            self._offset = (-mean / std).to(device, torch.float32)

    def __call__(self, images: Tensor) -> Tensor:
        """Return (n, 3, h, w) float32 of images (n, h, w, 3) on the device."""
        planes = images.permute(0, 3, 1, 2)  # of a contiguous image this is channels-last, without a copy
        if images.dtype is torch.uint8:
            planes = torch.addcmul(self._offset, planes.float(), self._factor)
        return planes if self._channels_last else planes.contiguous()


class Prefetcher:
    """Iterates over batches on a device.

    On CUDA, copies and normalisation run on a separate stream, while the device computes the previous step.
    """

    def __init__(self, batches: Iterable[HostBatch], to_input: ToInput, device: torch.device) -> None:
        self._batches, self._to_input, self._device = batches, to_input, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[DeviceBatch]:
        for batch in self._batches:
            yield self._move(batch) if self._stream is None else self._move_aside(batch, self._stream)

    def _move(self, batch: HostBatch) -> DeviceBatch:
        images = batch.images.to(self._device, non_blocking=True)
        labels = batch.labels.to(self._device, non_blocking=True).long()
        return DeviceBatch(self._to_input(images), labels, batch.paths, batch.undo)

    def _move_aside(self, batch: HostBatch, stream: torch.cuda.Stream) -> DeviceBatch:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            moved = self._move(batch)
        current.wait_stream(stream)
        for tensor in (moved.images, moved.labels):
            tensor.record_stream(
                current
            )  # its memory belongs to the side stream, which must not reuse it before this stream is done
        return moved
