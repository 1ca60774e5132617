"""What a command's MODEL means: a module of the user's from FILE:FACTORY, or a network of the registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mezzo._arguments import check_at_least
from mezzo.bench._task import IMAGE_SIZE, SEED, ModelError, find_place, load_task
from mezzo.errors import MezzoError, RunError, unknown_choice
from mezzo.models import create_model, model_info
from mezzo.models._registry import names_and_aliases
from mezzo.proof import Task, random_states_kept


def find_task(reference: str, batch_size: int, image_size: int = IMAGE_SIZE, *, is_chosen: bool = False) -> Task:
    """Return the model that a reference names with a batch to train it on, on the CPU; the same numbers at every call.

    Args:
        reference: FILE:FACTORY, as `load_task` takes it, or a name of `list_models()`.
        batch_size: Samples of a batch that is made here.
        image_size: Side of the images that a network of the registry gets; they are noise, their labels are drawn.
        is_chosen: Whether the user asked for this batch size; see `load_task`.

    Raises:
        ModelError: The reference names no usable model.
        ValueError: A number is below 1.
        RunError: The user's factory raised.
    """
    for name, value in (("batch_size", batch_size), ("image_size", image_size)):
        check_at_least(name, value)
    with random_states_kept():
        if ":" in reference:
            try:
                return load_task(reference, batch_size, is_chosen=is_chosen)
            except ModelError as error:
                raise ModelError(str(error).removeprefix("--model ")) from error
        if reference not in names_and_aliases():
            advice = "for a model of your own give FILE:FACTORY, such as net.py:build_model"
            raise ModelError(f"{unknown_choice('model', reference, names_and_aliases())}; {advice}")
        return _registry_task(reference, batch_size, image_size)


@contextmanager
def failures_explained(reference: str, device: torch.device, batch_size: int | None) -> Iterator[None]:
    """Turn what the user's own code raises inside into a `RunError` that says where; ours keeps its traceback."""
    try:
        yield
    except MezzoError:
        raise
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            batch = "its own batch" if batch_size is None else f"a batch of {batch_size}"
            raise RunError(
                f"out of memory on {device} with {batch}; give a smaller --batch-size, or make a smaller batch"
            ) from error
        if ":" not in reference:
            raise
        where = find_place(error, reference)
        if isinstance(error, ValueError) and where == reference.rpartition(":")[0]:  # of ours, about an option
            raise
        raise RunError(f"{where}: training failed: {type(error).__name__}: {error}") from error


def _registry_task(name: str, batch_size: int, image_size: int) -> Task:
    info = model_info(name)
    torch.manual_seed(SEED)
    model: nn.Module = create_model(name)
    images = torch.randn(batch_size, 3, image_size, image_size)
    shape = (batch_size,) if info.task == "classification" else (batch_size, image_size, image_size)
    return Task(model, images, torch.randint(info.num_classes, shape), _mean_over_heads)


def _mean_over_heads(output: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy, the mean of all heads' where a network has several."""
    heads = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([cross_entropy(logits, labels) for logits in heads]).mean()
