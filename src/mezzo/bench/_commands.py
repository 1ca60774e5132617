"""`mezzo doctor` and `mezzo bisect`: the proof tools, on a model that a command names."""

from __future__ import annotations

from typing import Any

from mezzo.bench._factories import ModelError, find_factory, find_place
from mezzo.bench._workloads import batch_words, failures_explained, find_workload
from mezzo.devices import find_device
from mezzo.errors import RunError
from mezzo.proof import Bisection, MemoryReport, Report, advise, bisect, predict_fit

DOCTOR_BATCH_SIZE = 16
DOCTOR_IMAGE_SIZE = 224
BISECT_BATCH_SIZE = 8


def bisect_model(model: str, *, batch_size: int | None = None, device: str | None = None, **options: Any) -> Bisection:
    """Find which parts of a model must stay in float32.

    Args:
        model: FILE:FACTORY or a name of the registry (`find_workload`).
        batch_size: None: 8, or the batch that the factory makes.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        options: Passed to `mezzo.proof.bisect`.

    Raises:
        MezzoError: There is no such model, or it fails; the message names file and line.
        ValueError: An option is wrong.
    """
    place = find_device(device)
    size = BISECT_BATCH_SIZE if batch_size is None else batch_size
    workload = find_workload(model, size, is_chosen=batch_size is not None).copied(place)
    with failures_explained(model, place, batch_words(workload.batch_size)):
        return bisect(workload.model, workload.inputs, workload.targets, workload.loss_fn, **options)


def examine_model(
    model: str,
    *,
    batch_size: int | None = None,
    image_size: int = DOCTOR_IMAGE_SIZE,
    device: str | None = None,
    loader: str | None = None,
    **options: Any,
) -> Report:
    """Return the doctor's advice for a model.

    Args:
        model: FILE:FACTORY or a name of the registry (`find_workload`).
        batch_size: None: 16, or the batch that the factory makes.
        image_size: Height and width of the images for a network of the registry.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        loader: FILE:FACTORY of a function that returns a data loader.
        options: Passed to `mezzo.proof.advise`.

    Raises:
        MezzoError: There is no such model or loader, or it fails; the message names file and line.
        ValueError: An option is wrong.
    """
    place = find_device(device)
    size = DOCTOR_BATCH_SIZE if batch_size is None else batch_size
    workload = find_workload(model, size, image_size, is_chosen=batch_size is not None)
    batches = None if loader is None else _make_loader(loader)
    with failures_explained(model, place, batch_words(workload.batch_size)):
        return advise(
            workload.model, workload.inputs, workload.targets, workload.loss_fn, device=place, loader=batches, **options
        )


def predict_model(
    model: str,
    *,
    batch_size: int | None = None,
    image_size: int = DOCTOR_IMAGE_SIZE,
    device: str | None = None,
    **options: Any,
) -> MemoryReport:
    """Return the predicted memory of a model's step, which does not run.

    Args:
        model: As for `examine_model`.
        batch_size: The same.
        image_size: The same.
        device: Where the step would run; None: a GPU, also if there is none at hand.
        options: Passed to `mezzo.proof.predict_fit`.
    """
    size = DOCTOR_BATCH_SIZE if batch_size is None else batch_size
    workload = find_workload(model, size, image_size, is_chosen=batch_size is not None, has_numbers=False)
    place = None if device is None else find_device(device)
    with failures_explained(model, find_device(device), batch_words(workload.batch_size)):
        return predict_fit(workload, device=place, **options)


def _make_loader(reference: str) -> Any:
    factory = find_factory(reference, option="--loader", wanted="a data loader")
    try:
        loader = factory()
    except Exception as error:  # the user's code may raise anything
        raise RunError(f"{find_place(error, reference)}: raised {type(error).__name__}: {error}") from error
    if not hasattr(loader, "__iter__"):
        raise ModelError(f"--loader {reference!r}: returned {type(loader).__name__}, must return a data loader")
    return loader
