"""A bisection of a model that a command names (`mezzo bisect`)."""

from __future__ import annotations

from typing import Any

from mezzo.bench._device import find_device
from mezzo.bench._find_task import failures_explained, find_task
from mezzo.proof import Bisection, bisect


def bisect_model(model: str, *, batch_size: int = 8, device: str | None = None, **options: Any) -> Bisection:
    """Return what of a model must stay in float32.

    Args:
        model: FILE:FACTORY or a name of the registry (`find_task`).
        batch_size: Samples of a batch that is made here.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        options: Of `mezzo.proof.bisect`.

    Raises:
        MezzoError: There is no such model, or it fails; the message says where.
        ValueError: An option is wrong.
    """
    place = find_device(device, "mezzo bisect")
    task = find_task(model, batch_size).copied(place)
    with failures_explained(model, place, batch_size):
        return bisect(task.model, task.inputs, task.targets, task.loss_fn, **options)
