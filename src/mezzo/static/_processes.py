"""Several processes that train one model in compiled steps, which average their gradients.

`DistributedDataParallel` averages gradients in hooks of the backward pass. A CUDA graph cannot hold
these hooks: they keep state on the host. So the step averages the gradients itself, between the
backward pass and the check. The collectives are part of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._torch.foreach import foreach_copy_
from mezzo.optim import is_dtensor, share_weights

_BUCKET_BYTES = 25 * 2**20
"""As DDP's: large enough for the bandwidth, small enough for little extra memory."""


class Processes:
    """The processes of a group: averages gradients, and copies the first process's buffers to all.

    Args:
        model: The same network in every process, without a wrapper.
        group: The process group.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        self._model, self._group = model, group
        self._size = dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)
        self._is_paused = False

    def connect(self) -> None:
        """Call the collectives of a step once: a library sets itself up in their first calls."""
        params = [param for param in self._model.parameters() if param.requires_grad]
        self.average([torch.zeros_like(param) for param in params])
        self.share_buffers()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is sent.

        Only some processes may meet a new shape and warm up; the others would not answer.
        """
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @torch.no_grad()
    def average(self, grads: Sequence[Tensor]) -> None:
        """Replace gradients by their mean over the processes, in place.

        They are divided before the sum, as DDP does, so that a sum of half gradients overflows only
        if the mean does. An infinite gradient of one process is not finite in any process then, so
        all of them skip the same steps.

        Raises:
            TypeError: A gradient is sparse.
        """
        if self._is_paused:
            return
        for grad in grads:
            if grad.is_sparse:
                raise TypeError("process_group: a sparse gradient cannot be averaged; it must be a dense tensor")
        for bucket in _buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket]).mul_(1.0 / self._size)
            dist.all_reduce(flat, group=self._group)
            _put_back(bucket, flat)

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Copy the buffers of the first process to all, such as running statistics."""
        if self._is_paused:
            return
        for bucket in _buckets(list(self._model.buffers())):
            flat = torch.cat([buffer.reshape(-1) for buffer in bucket])
            dist.broadcast(flat, self._first, group=self._group)
            _put_back(bucket, flat)


def _put_back(bucket: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in bucket])
    foreach_copy_(list(bucket), [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one device and dtype, in order, up to a limit of bytes."""
    found: defaultdict[Any, list[list[Tensor]]] = defaultdict(list)
    sizes: dict[Any, int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        kind, size = (tensor.device, tensor.dtype), tensor.numel() * tensor.element_size()
        if not found[kind] or sizes[kind] + size > _BUCKET_BYTES:
            found[kind].append([])
            sizes[kind] = 0
        found[kind][-1].append(tensor)
        sizes[kind] += size
    return [bucket for buckets in found.values() for bucket in buckets]


def processes_of(model: nn.Module, process_group: Any) -> tuple[nn.Module, Processes | None]:
    """Return the model without DDP's wrapper, and the processes; None if there is only this one.

    A wrapper has given all processes the same weights. Without one, all get those of the first
    process of the group.

    Raises:
        ValueError: The model is sharded, or wrapped and on a GPU, or there are two groups.
        TypeError: `process_group` is not a process group.
    """
    if isinstance(model, nn.Module) and any(map(is_dtensor, model.parameters())):
        raise ValueError(
            "model: its weights are sharded (FSDP2), and a captured step cannot gather them; use precision.train_step(), and "
            "torch.compile for the blocks"
        )
    if isinstance(model, DistributedDataParallel):
        if any(param.is_cuda for param in model.parameters()):
            raise ValueError(
                "model: on a GPU compile_step takes the network itself, not DistributedDataParallel, whose hooks belong to "
                "another stream than a captured step; give model.module, delete the wrapper, and give process_group="
            )
        if process_group is not None:
            raise ValueError("process_group: DistributedDataParallel has its own; give it with the network itself")
        return model.module, Processes(model.module, model.process_group)
    if process_group is None:
        return model, None
    if not dist.is_available() or not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group={process_group!r}: must be a process group, such as torch.distributed.group.WORLD after "
            "torch.distributed.init_process_group()"
        )
    share_weights(model, process_group)
    return model, Processes(model, process_group)
