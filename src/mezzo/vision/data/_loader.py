"""Loads batches of decoded and transformed samples with persistent worker processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from mezzo._torch.data_loaders import end_workers, has_workers, translate_worker_errors
from mezzo.errors import MezzoError
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._sample import Dataset, Sample
from mezzo.vision.data._stream import Key, Shard, Stream
from mezzo.vision.data.transforms import Compose


@dataclass(slots=True)
class HostBatch:
    """A batch on the host; `images` is (n, h, w, 3) uint8, or float32 after a Normalize on the host."""

    images: Tensor
    labels: Tensor
    paths: list[str]
    undo: tuple[tuple[str, int, int], ...] = ()
    """See `Sample.undo`; the same for all images of a batch."""

    def pin_memory(self) -> HostBatch:
        """Return the batch in page-locked memory; called by the `DataLoader`."""
        return HostBatch(self.images.pin_memory(), self.labels.pin_memory(), self.paths, self.undo)


class _SampleReader(data.Dataset[Any]):
    """Reads and transforms one sample; seed, epoch and index determine all random choices.

    Errors in the data are returned: raised in a worker, they would be wrapped in its traceback.
    """

    def __init__(self, dataset: Dataset, transforms: Compose, seed: int) -> None:
        self._dataset, self._transforms, self._seed = dataset, transforms, seed

    def __getitem__(self, key: Key) -> Sample | MezzoError:
        epoch, index = key
        try:
            rng = np.random.default_rng([self._seed, epoch, index])
            return self._transforms(self._dataset.read(index), rng)
        except MezzoError as error:
            return error


def _collate(samples: Sequence[Sample | MezzoError]) -> HostBatch | MezzoError:
    for sample in samples:
        if isinstance(sample, MezzoError):
            return sample
    good = cast(Sequence[Any], samples)  # no errors among them
    for sample in good:
        if sample.label is None:
            return DataError(f"{sample.path}: has no label, and training and evaluation need one")
        if sample.image.shape != good[0].image.shape:
            return DataError(_two_sizes("images", good[0].path, good[0].image, sample.path, sample.image))
        if np.shape(sample.label) != np.shape(good[0].label) or sample.undo != good[0].undo:
            return DataError(_two_sizes("labels", good[0].path, good[0].label, sample.path, sample.label))
    return HostBatch(
        torch.from_numpy(np.stack([sample.image for sample in good])),
        torch.from_numpy(np.stack([np.asarray(sample.label) for sample in good])),
        [sample.path for sample in good],
        good[0].undo,
    )


def _two_sizes(what: str, path: str, array: Any, other_path: str, other: Any) -> str:
    (height, width), (other_height, other_width) = np.shape(array)[:2], np.shape(other)[:2]
    return (
        f"a batch needs {what} of one size: {path} has {width}x{height}, {other_path} {other_width}x{other_height}; "
        "end the transforms with a crop or Resize of fixed size, or use a batch size of 1"
    )


def _start_worker(_number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C and ends its workers
    cv2.setNumThreads(0)  # the workers are the parallelism
    torch.set_num_threads(1)


class _Gated:
    """A batch sampler that is empty while it is closed."""

    def __init__(self, batches: Stream | Shard) -> None:
        self._batches, self.is_open = batches, True

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self._batches) if self.is_open else iter(())


class Loader:
    """Batches of a data set, read ahead by workers.

    Args:
        dataset: The data set.
        transforms: Applied to each sample on the host.
        batches: A `Stream` to train on, a `Shard` to evaluate.
        seed: Seed of the random transforms.
        workers: Number of worker processes; 0 reads in this process.
        pinned: Deliver in page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        dataset: Dataset,
        transforms: Compose,
        batches: Stream | Shard,
        *,
        seed: int = 0,
        workers: int = 0,
        pinned: bool = False,
    ) -> None:
        self.dataset, self.batches, self._workers = dataset, batches, workers
        self._gate = _Gated(batches)
        self._loader: data.DataLoader[Any] = data.DataLoader(
            _SampleReader(dataset, transforms, seed),
            batch_sampler=cast(Any, self._gate),
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=pinned,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # separate, so that starting a loader does not change the global generator
        )

    def start(self) -> None:
        """Start the workers now; they start reading with the first iteration.

        Workers are forked. Once other threads run (of a second loader, of a writer), a fork may hang: in Python below
        3.11.8 and 3.12.1 the child waits for a lock that a thread of its parent held (CPython gh-112275).
        """
        if self._workers and not has_workers(self._loader):
            self._gate.is_open = False
            iter(self._loader)
            self._gate.is_open = True

    def close(self) -> None:
        """End the workers."""
        end_workers(self._loader)

    def __iter__(self) -> Iterator[HostBatch]:
        batches = iter(self._loader)
        while True:
            with translate_worker_errors():
                batch = next(batches, None)
            if batch is None:
                return
            if isinstance(batch, MezzoError):
                raise batch
            yield batch
