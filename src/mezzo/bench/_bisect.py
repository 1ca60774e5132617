"""A bisection of a model that a command names (`mezzo bisect`)."""

from __future__ import annotations

from typing import Any

from mezzo.bench._device import find_device
from mezzo.bench._find_task import failures_explained, find_task
from mezzo.proof import Bisection, bisect

BATCH_SIZE = 8


def bisect_model(model: str, *, batch_size: int | None = None, device: str | None = None, **options: Any) -> Bisection:
    """Return what of a model must stay in float32.

    Args:
        model: FILE:FACTORY or a name of the registry (`find_task`).
        batch_size: Of a batch that is made here, or by a factory that takes `batch_size`; None: 8, or the factory's own.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        options: Of `mezzo.proof.bisect`.

    Raises:
        MezzoError: There is no such model, or it fails; the message says where.
        ValueError: An option is wrong.
    """
    place = find_device(device, "mezzo bisect")
    size = BATCH_SIZE if batch_size is None else batch_size
    task = find_task(model, size, is_chosen=batch_size is not None).copied(place)
    with failures_explained(model, place, task.batch_size):
        return bisect(task.model, task.inputs, task.targets, task.loss_fn, **options)
