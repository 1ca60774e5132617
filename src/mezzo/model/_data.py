"""Batches for `mezzo.Model`, from data sets, loaders or iterables, split into inputs and labels."""

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
    """Return how many inputs forward requires: its arguments without a default, at least one.

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
    """Return a loader for a data set; return a loader or another iterable of batches unchanged.

    Args:
        data: A data set with a length, or batches. A list counts as a data set of samples.
        world: The processes; each gets its share of a data set. An `IterableDataset` is distributed
            sample by sample. If it already selects its own share, pass it in a `DataLoader`.
        batch_size: Samples per batch and process.
        shuffle: Shuffle before every epoch.
        drop_last: Skip the last batch if it is smaller.
        num_workers: Processes that read the data.
        share: The share of a process. `even`: all processes get the same number of batches, because
            they average gradients in every step; a few samples may occur twice. `exact`: every
            sample is in exactly one process. `none`: every process gets the whole data set.

    Raises:
        TypeError: `data` is not iterable, or is a mapping.
        ValueError: The data set is empty, or the batch size is below 1.
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
        raise TypeError(
            f"{type(data).__name__}: a data set needs __len__; without a length it must be an IterableDataset"
        )
    if not len(sized):
        raise ValueError("the data set is empty: there is nothing to iterate over")
    if not is_split:
        return DataLoader(sized, shuffle=shuffle, **options)
    if share == "even":
        sampler: Any = DistributedSampler(sized, world.size, world.rank, shuffle=shuffle, drop_last=drop_last)
    else:  # each sample exactly once, so that sums over processes are right; torch has no sampler for this
        sampler = range(world.rank, len(sized), world.size)
    return DataLoader(sized, sampler=sampler, **options)


class _Part(IterableDataset[Any]):
    """The samples of a stream for one process: every `size`-th one.

    With `is_even`, an incomplete last round is dropped, so that all processes get equally many.
    """

    def __init__(self, whole: IterableDataset[Any], world: World, *, is_even: bool) -> None:
        self._whole, self._rank, self._size, self._is_even = whole, world.rank, world.size, is_even

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._whole)
        while dealt := list(itertools.islice(samples, self._size)):
            if self._rank < len(dealt) and not (self._is_even and len(dealt) < self._size):
                yield dealt[self._rank]


def begin_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Set the epoch of a distributed sampler, which changes its order."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def length_of(loader: Iterable[Any], most: int | None = None) -> int | None:
    """Return the number of batches, at most `most`; `most` if the loader has no length."""
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
    """Return the contents of a batch as a flat list of tensors on the device.

    Args:
        values: A tensor, an array, a number, or lists and tuples of them; None is an empty list.
        device: Device of the network.
        double: Whether the network computes in float64. Otherwise float64 values, which are NumPy's
            default, become float32.

    Raises:
        TypeError: `values` contains an object of another type.
    """
    if values is None:
        return []
    if isinstance(values, (Tensor, np.ndarray, np.generic, bool, int, float)):
        is_locked = isinstance(values, np.ndarray) and not values.flags.writeable
        tensor = torch.as_tensor(np.array(values) if is_locked else values)  # torch warns about read-only arrays
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
            "then labels; Model(network, inputs=[...]) sets the number of inputs"
        )
    return tensors[:inputs], tensors[inputs:]


def as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, and any other value as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def count_samples(inputs: list[Tensor]) -> int:
    """Return how many samples a batch has."""
    return inputs[0].shape[0] if inputs and inputs[0].dim() else 1
