"""A bisection of a model that a command names (`mezzo bisect`)."""

from __future__ import annotations

from typing import Any

import torch

from mezzo._errors import MezzoError, RunError
from mezzo.bench._device import find_device
from mezzo.bench._find_task import find_task
from mezzo.bench._task import find_place
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
    try:
        return bisect(task.model, task.inputs, task.targets, task.loss_fn, **options)
    except MezzoError:
        raise
    except Exception as error:  # the user's own code runs in here; a fault of ours keeps its traceback below
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise RunError(f"out of memory on {place}; choose a smaller --batch-size than {batch_size}") from error
        if ":" not in model:
            raise
        where = find_place(error, model)
        if isinstance(error, ValueError) and where == model.rpartition(":")[0]:  # of ours, about an option
            raise
        raise RunError(f"{where}: training failed: {type(error).__name__}: {error}") from error
