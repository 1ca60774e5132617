"""The samples of each batch as a function of seed and step, so that a run can resume at any step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mezzo._arguments import check_at_least
from mezzo.vision.data._errors import DataError

Key = tuple[int, int]
"""Epoch and index of a sample; with the seed they determine all random choices for it."""


class Stream:
    """The endless sequence of batches of one process; a batch sampler for a `DataLoader`.

    Every epoch has a new order. A global batch is a slice of that order; each process gets its part of it. No sample
    occurs twice in an epoch, and the remainder that does not fill a global batch is dropped. A data set smaller than one
    global batch gives one short batch per epoch, divided equally among the processes.

    Args:
        length: Number of samples, at least one per process.
        batch_size: Batch size of one process; the attribute is smaller for a small data set.
        seed: Determines the orders.
        rank: Rank of this process.
        world_size: Number of processes.
        first_step: Step to resume at.
        name: Name of the data set in messages.

    >>> [index for _, index in Stream(5, 2, seed=0).batch(0)] != [index for _, index in Stream(5, 2, seed=1).batch(0)]
    True
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
        name: str = "the data set",
    ) -> None:
        check_at_least("batch_size", batch_size, raising=DataError)
        if length < world_size:
            raise DataError(
                f"{name} has {length} samples for {world_size} processes, each needs one; use at most {length} processes"
                if length
                else f"{name} has no samples"
            )
        self.length, self.seed, self.rank = length, seed, rank
        self.is_short = batch_size * world_size > length
        self.batch_size = min(batch_size, length // world_size)
        self.global_batch_size = self.batch_size * world_size
        self.steps_per_epoch = 1 if self.is_short else length // self.global_batch_size
        self.first_step = first_step
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def epoch_of(self, step: int) -> int:
        """Return the epoch a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[Key]:
        """Return the samples of this process in a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.length)
        start = position * self.global_batch_size + self.rank * self.batch_size
        return [(epoch, int(index)) for index in self._order[start : start + self.batch_size]]

    def __iter__(self) -> Iterator[list[Key]]:
        step = self.first_step
        while True:
            yield self.batch(step)
            step += 1


class Shard:
    """Batches for evaluation: every sample once, in order, divided among the processes.

    The numbers of samples of two processes differ by at most one.
    """

    def __init__(self, length: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self._indices = range(rank, length, world_size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self._indices), self._batch_size):
            yield [(0, index) for index in self._indices[start : start + self._batch_size]]
