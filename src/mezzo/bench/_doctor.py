"""The doctor's look at a model, and at a data loader, that a command names (`mezzo doctor`)."""

from __future__ import annotations

from typing import Any

from mezzo.bench._device import find_device
from mezzo.bench._find_task import failures_explained, find_task
from mezzo.bench._task import ModelError, find_factory, find_place
from mezzo.errors import RunError
from mezzo.proof import Report, advise

BATCH_SIZE = 16
IMAGE_SIZE = 224


def examine_model(
    model: str,
    *,
    batch_size: int | None = None,
    image_size: int = IMAGE_SIZE,
    device: str | None = None,
    loader: str | None = None,
    **options: Any,
) -> Report:
    """Return the advice for a model.

    Args:
        model: FILE:FACTORY or a name of the registry (`find_task`).
        batch_size: Of a batch that is made here, or by a factory that takes `batch_size`; None: 16, or the factory's own.
        image_size: Side of the images that a network of the registry gets.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        loader: FILE:FACTORY of a function that returns a data loader.
        options: Of `mezzo.proof.advise`.

    Raises:
        MezzoError: There is no such model or loader, or it fails; the message says where.
        ValueError: An option is wrong.
    """
    place = find_device(device, "mezzo doctor")
    size = BATCH_SIZE if batch_size is None else batch_size
    task = find_task(model, size, image_size, is_chosen=batch_size is not None)
    batches = None if loader is None else make_loader(loader)
    with failures_explained(model, place, task.batch_size):
        return advise(task.model, task.inputs, task.targets, task.loss_fn, device=place, loader=batches, **options)


def make_loader(reference: str) -> Any:
    """Return the data loader that FILE:FACTORY makes.

    Raises:
        ModelError: It names no function, or the function returns nothing to iterate over.
        RunError: The function raised.
    """
    factory = find_factory(reference, option="--loader", wanted="a data loader")
    try:
        made = factory()
    except Exception as error:  # whatever the user's code raises, the line says where
        raise RunError(f"{find_place(error, reference)}: raised {type(error).__name__}: {error}") from error
    if not hasattr(made, "__iter__"):
        raise ModelError(f"--loader {reference!r}: returned {type(made).__name__}, must return a data loader")
    return made
