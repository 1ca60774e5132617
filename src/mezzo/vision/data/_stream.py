"""Which samples make up which batch: a function of the seed and the step, so that a run can go on at any step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mezzo._arguments import check_at_least
from mezzo.vision.data._errors import DataError

Key = tuple[int, int]
"""Epoch and index of a sample: with the seed it decides everything random that happens to the sample."""


class Stream:
    """The batches of one process, in their order, without end; a batch sampler for a `DataLoader`.

    Every epoch has another order. A global batch is a run of that order, each process has its own part of it, and no sample
    comes twice in an epoch; the rest that does not fill a global batch is left out. A set that is smaller than one global
    batch makes one short batch an epoch: every process takes an equal part of it.

    Args:
        length: Samples in the data set, at least one per process.
        batch_size: Samples in a batch of one process; the attribute of that name is smaller for a small set.
        seed: Decides the orders.
        rank: This process, from 0.
        world_size: Processes.
        first_step: Where to go on.
        name: Of the data set, for messages.

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
    """Batches of every sample once, in order, shared among processes: what evaluation reads.

    The parts of two processes differ by a sample at most, and none comes twice.
    """

    def __init__(self, length: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self._indices = range(rank, length, world_size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._indices) // self._batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self._indices), self._batch_size):
            yield [(0, index) for index in self._indices[start : start + self._batch_size]]
