"""What benchmarks train: the AMP guide's network, a network of the registry, or the user's FILE:FACTORY."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from mezzo._arguments import check_at_least
from mezzo._torch.pytree import tree_leaves
from mezzo.bench._factories import (
    WORKLOAD_WANTED,
    ModelError,
    batch_size_parameter,
    call_factory,
    find_factory,
    find_place,
)
from mezzo.errors import MezzoError, RunError, unknown_choice
from mezzo.trial import Workload, random_states_kept
from mezzo.vision.models import create_model, model_info, names_and_aliases

SEED = 100  # the guide's
IMAGE_SIZE = 64
SMALL_LAYERS, SMALL_SIZE, SMALL_BATCH = 71, 64, 64  # 142 tensors, as many as MobileNetV3-small has


class SimpleNet(nn.Module):
    """Nine linear layers of equal width (AMP guide, 2.1.1), with Xavier-uniform weights so that every layer matters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(size, size) for _ in range(9))
        for layer in self.linears:
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the ninth layer's output for inputs of shape (batch, size)."""
        for layer in self.linears:
            x = layer(x)
        return x


def simple_net_workload(size: int, batch_size: int, device: torch.device) -> Workload:
    """Return SimpleNet with uniform [0, 1) data and labels; every call draws the same numbers."""
    torch.manual_seed(SEED)
    with device:
        model = SimpleNet(size)
        inputs, targets = torch.rand(batch_size, size), torch.rand(batch_size, size)
    return Workload(model, inputs, targets, mse_loss)


class SmallNet(nn.Module):
    """71 small residual layers (142 tensors): the host limits the speed of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SMALL_SIZE, SMALL_SIZE) for _ in range(SMALL_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output for inputs of shape (batch, 64)."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def small_net_workload(device: torch.device) -> Workload:
    """Return SmallNet with uniform data; every call draws the same numbers."""
    torch.manual_seed(SEED)
    with device:
        model = SmallNet()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.01, 0.01)
        inputs, targets = torch.rand(SMALL_BATCH, SMALL_SIZE), torch.rand(SMALL_BATCH, SMALL_SIZE)
    return Workload(model, inputs, targets, mse_loss)


def find_workload(
    reference: str, batch_size: int, image_size: int = IMAGE_SIZE, *, is_chosen: bool = False
) -> Workload:
    """Return the named model with a batch, on the CPU; every call draws the same numbers.

    Args:
        reference: FILE:FACTORY, as for `load_workload`, or a name of `list_models()`.
        batch_size: Samples of a batch that mezzo makes.
        image_size: Height and width of the random images for a network of the registry.
        is_chosen: Whether the user chose the batch size; see `load_workload`.

    Raises:
        ModelError: The reference names no usable model.
        ValueError: A number is below 1.
        RunError: The user's factory raised.
    """
    for name, value in (("batch_size", batch_size), ("image_size", image_size)):
        check_at_least(name, value)
    with random_states_kept():
        if ":" in reference or reference.endswith(".py"):
            return load_workload(reference, batch_size, is_chosen=is_chosen, option="")
        if reference not in names_and_aliases():
            advice = "for a model of your own give FILE:FACTORY, such as net.py:build_model"
            raise ModelError(f"{unknown_choice('model', reference, names_and_aliases())}; {advice}")
        return _registry_workload(reference, batch_size, image_size)


def _registry_workload(name: str, batch_size: int, image_size: int) -> Workload:
    info = model_info(name)
    torch.manual_seed(SEED)
    model: nn.Module = create_model(name)
    images = torch.randn(batch_size, 3, image_size, image_size)
    shape = (batch_size,) if info.task == "classification" else (batch_size, image_size, image_size)
    return Workload(model, images, torch.randint(info.num_classes, shape), _mean_over_heads)


def _mean_over_heads(output: Any, labels: Tensor) -> Tensor:
    heads = [output] if isinstance(output, Tensor) else list(output)
    return torch.stack([cross_entropy(logits, labels) for logits in heads]).mean()


def load_workload(reference: str, batch_size: int, *, is_chosen: bool = False, option: str = "--model") -> Workload:
    """Return the workload that FILE:FACTORY makes, on the CPU.

    The factory returns (module, inputs, targets, loss_fn) or only a module. A module gets uniform [0, 1) inputs of the
    shape that its first linear or convolution layer takes, uniform targets of its output's shape, and the mean squared
    error. A tuple of inputs holds positional arguments of the model, a dict named ones.

    Args:
        reference: FILE:FACTORY.
        batch_size: Samples of a batch that mezzo makes.
        is_chosen: Whether the user chose this batch size; a factory with `batch_size` or **kwargs then gets it.
        option: The option that gave the reference, for messages; may be empty.

    Raises:
        ModelError: The result is not usable, or the factory makes its own batch although the user chose a size.
        RunError: The factory raised.
    """
    factory = find_factory(reference, option=option)
    parameter = batch_size_parameter(factory)
    takes_any = parameter is not None and parameter.kind is parameter.VAR_KEYWORD
    is_given = parameter is not None and not takes_any and (is_chosen or parameter.default is parameter.empty)
    try:
        torch.manual_seed(SEED)
        made = call_factory(factory, batch_size if is_given else None)
        # A factory that returns only a module may pass **kwargs on to the module, which has no batch size.
        if is_chosen and takes_any and not isinstance(made, nn.Module):
            torch.manual_seed(SEED)
            made = call_factory(factory, batch_size)
    except Exception as error:  # the user's code may raise anything
        name = reference.rpartition(":")[2]
        raise RunError(f"{find_place(error, reference)}: {name}() raised {type(error).__name__}: {error}") from error
    workload = _as_workload(made, f"{option} {reference!r}".lstrip(), batch_size)
    if is_given or (is_chosen and takes_any and _has_size(workload, batch_size)):
        return replace(workload, samples=batch_size)
    if isinstance(made, nn.Module) or not is_chosen:
        return workload
    own = "" if workload.batch_size is None else f" of {workload.batch_size}"
    raise ModelError(
        f"--batch-size {batch_size}: {reference!r} makes its own batch{own}; let the factory take batch_size, or leave "
        "the option out"
    )


def _has_size(workload: Workload, size: int) -> bool:
    """Return whether any input has this size; a factory may ignore **kwargs."""
    return any(size in leaf.shape for leaf in tree_leaves(workload.inputs) if isinstance(leaf, Tensor))


def _as_workload(made: Any, label: str, batch_size: int) -> Workload:
    if isinstance(made, nn.Module):
        return _with_data(made, label, batch_size)
    if isinstance(made, tuple) and len(made) == 4:
        model, inputs, targets, loss_fn = made
        if isinstance(model, nn.Module) and callable(loss_fn):
            return Workload(model, inputs, targets, loss_fn)
    raise ModelError(f"{label}: returned {_describe(made)}, must return {WORKLOAD_WANTED}")


def _with_data(model: nn.Module, label: str, batch_size: int) -> Workload:
    advice = "return (module, inputs, targets, loss_fn)"
    shape = _input_shape(model)
    if shape is None:
        raise ModelError(f"{label}: has no linear or convolution layer to read its input from; {advice}")
    inputs = torch.rand(batch_size, *shape)
    try:
        with torch.no_grad():
            output = copy.deepcopy(model)(inputs)  # a copy: the forward pass changes BatchNorm statistics
    except Exception as error:  # the user's forward may raise anything
        shown = tuple(inputs.shape)
        raise ModelError(
            f"{label}: does not take inputs of shape {shown}: {error}; {advice} to give its own"
        ) from error
    if not isinstance(output, Tensor):
        raise ModelError(f"{label}: its output is {_describe(output)}, not a tensor; {advice} with a loss for it")
    return Workload(model, inputs, torch.rand_like(output), mse_loss, batch_size)


def _input_shape(model: nn.Module) -> tuple[int, ...] | None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            return (layer.in_features,)
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return (layer.in_channels, *[IMAGE_SIZE] * len(layer.kernel_size))
    return None


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


@contextmanager
def failures_explained(reference: str, device: torch.device, batch: str, advice: str = "") -> Iterator[None]:
    """Turn an exception of the user's code into a `RunError` with file and line; mezzo's own exceptions pass.

    Args:
        reference: FILE:FACTORY, or the name of a model of mezzo, whose exceptions all pass.
        device: Where the model runs, for the message about memory.
        batch: The batch, for that message.
        advice: What to do about memory; empty: use a smaller batch.
    """
    try:
        yield
    except MezzoError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            advice = advice or "give a smaller --batch-size, or make a smaller batch"
            raise RunError(f"out of memory on {device} with {batch}; {advice}") from error
        if ":" not in reference:
            raise
        where = find_place(error, reference)
        if isinstance(error, ValueError) and where == reference.rpartition(":")[0]:  # mezzo's, about an option
            raise
        raise RunError(f"{where}: training failed: {type(error).__name__}: {error}") from error


def batch_words(batch_size: int | None) -> str:
    """Return how a message names the batch."""
    return "its own batch" if batch_size is None else f"a batch of {batch_size}"


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory"))
