"""Batches for `mezzo.Model`: from a data set, a loader or any iterable; which part is input, which label."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from mezzo._arguments import check_at_least
from mezzo.model.parallel import World

T = TypeVar("T")


def count_inputs(network: nn.Module) -> int:
    """Return how many tensors the network's forward asks for: its arguments without a default, at least one.

    >>> count_inputs(nn.Bilinear(2, 3, 4)), count_inputs(nn.Sequential())
    (2, 1)
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [
        p
        for p in inspect.signature(network.forward).parameters.values()
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]
    return max(1, len(found))


def make_loader(
    data: Any,
    world: World,
    *,
    batch_size: int,
    shuffle: bool = False,
    drop_last: bool = False,
    num_workers: int = 0,
    share: Literal["even", "exact", "none"] = "exact",
) -> Iterable[Any]:
    """Return batches of a data set; a loader, or any other iterable of batches, is returned as it is.

    Args:
        data: A data set with a length, or batches. A list counts as a data set of samples.
        world: The processes; each gets its share of a data set. A stream is dealt out sample by sample: one that deals itself
            out belongs into a loader.
        batch_size: Samples in a batch of one process.
        shuffle: Another order in every epoch.
        drop_last: Leave out the last batch if it is smaller.
        num_workers: Processes that read.
        share: What a process gets of a data set. `even`: as many batches as any other, a few samples twice if need be, since
            gradients are averaged in every step. `exact`: each sample is in one process. `none`: all of it.

    Raises:
        TypeError: There is nothing in it to iterate over.
        ValueError: The data set is empty, or the batch size below 1.
    """
    by_number = isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    if isinstance(data, Mapping) or not (by_number or isinstance(data, Iterable)):
        raise TypeError(f"data is a {type(data).__name__}: must be a Dataset, a DataLoader or an iterable of batches")
    if not by_number:
        return cast(Iterable[Any], data)
    check_at_least("batch_size", batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers, "drop_last": drop_last}
    options["pin_memory"] = world.device.type == "cuda"
    options["persistent_workers"] = num_workers > 0
    is_split = world.size > 1 and share != "none"
    if isinstance(data, IterableDataset):
        return DataLoader(_Part(data, world, is_even=share == "even") if is_split else data, **options)
    sized: Any = data
    if not hasattr(sized, "__len__"):
        raise TypeError(f"{type(data).__name__}: a data set needs __len__; one without a length is an IterableDataset")
    if not len(sized):
        raise ValueError("the data set is empty: there is nothing to iterate over")
    if not is_split:
        return DataLoader(sized, shuffle=shuffle, **options)
    if share == "even":
        sampler: Any = DistributedSampler(sized, world.size, world.rank, shuffle=shuffle, drop_last=drop_last)
    else:  # each sample once, so that sums over processes are right: no sampler of torch's does that
        sampler = range(world.rank, len(sized), world.size)
    return DataLoader(sized, sampler=sampler, **options)


class _Part(IterableDataset[Any]):
    """Every so-many-th sample of a stream: the part of one process; an even part ends where not all get one more."""

    def __init__(self, whole: IterableDataset[Any], world: World, *, is_even: bool) -> None:
        self._whole, self._rank, self._size, self._is_even = whole, world.rank, world.size, is_even

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._whole)
        while dealt := list(itertools.islice(samples, self._size)):
            if self._rank < len(dealt) and not (self._is_even and len(dealt) < self._size):
                yield dealt[self._rank]


def begin_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Give a sampler of several processes another order."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def length_of(loader: Iterable[Any], most: int | None = None) -> int | None:
    """Return how many batches will be taken, at most so many; None if nobody knows."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:
        return most
    return length if most is None else min(length, most)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last one.

    >>> list(with_last("ab"))
    [('a', False), ('b', True)]
    """
    iterator = iter(items)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def as_tensors(values: Any, device: torch.device, *, double: bool = False) -> list[Tensor]:
    """Return what a batch holds as a flat list of tensors on the device.

    Args:
        values: A tensor, an array, a number, or lists and tuples of them; None is an empty list.
        device: Where the network is.
        double: Whether it computes in float64. Else such values become float32: numpy's default is not a network's.

    Raises:
        TypeError: There is something else in it.
    """
    if values is None:
        return []
    if isinstance(values, (Tensor, np.ndarray, np.generic, bool, int, float)):
        is_locked = isinstance(values, np.ndarray) and not values.flags.writeable
        tensor = torch.as_tensor(np.array(values) if is_locked else values)  # of a locked one torch would warn
        narrow = tensor.float() if tensor.dtype is torch.float64 and not double else tensor
        return [narrow.to(device, non_blocking=True)]
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        return [tensor for value in values for tensor in as_tensors(value, device, double=double)]
    kind = "dict" if isinstance(values, Mapping) else type(values).__name__
    raise TypeError(
        f"a batch holds a {kind}: it must be a tensor, an array, or a list or tuple of them, inputs first, then labels; "
        "give the loader a collate_fn that makes one"
    )


def split_batch(
    batch: Any, inputs: int, device: torch.device, *, double: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs of a batch and its labels; see `as_tensors`.

    Raises:
        ValueError: The batch has fewer tensors than the network takes.
    """
    tensors = as_tensors(batch, device, double=double)
    if len(tensors) < inputs:
        raise ValueError(
            f"a batch has {len(tensors)} tensors, the network's forward takes {inputs}: the data set must give inputs first, "
            "then labels; Model(network, inputs=[...]) says how many are inputs"
        )
    return tensors[:inputs], tensors[inputs:]


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, anything else as a list of it."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def count_samples(inputs: list[Tensor]) -> int:
    """Return how many samples a batch has."""
    return inputs[0].shape[0] if inputs and inputs[0].dim() else 1
