"""What is trained in a comparison: the guide's nine-layer network, or a module of the user's from FILE:FACTORY."""

import copy
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._torch.pytree import tree_leaves
from mezzo.errors import MezzoError, RunError, unknown_choice
from mezzo.proof import Task

SEED = 100  # the guide's
IMAGE_SIZE = 64
_WANTED = "an nn.Module or (module, inputs, targets, loss_fn)"


class ModelError(MezzoError):
    """`--model FILE:FACTORY` names no usable model."""


class SimpleNet(nn.Module):
    """Nine linear layers of equal width (guide, 2.1.1); Xavier-uniform weights, so that every layer matters."""

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


def simple_net_task(size: int, batch_size: int, device: torch.device) -> Task:
    """Return the guide's network with uniform [0, 1) data and labels; the same numbers at every call."""
    torch.manual_seed(SEED)
    with device:
        model = SimpleNet(size)
        inputs, targets = torch.rand(batch_size, size), torch.rand(batch_size, size)
    return Task(model, inputs, targets, nn.functional.mse_loss)


def load_task(reference: str, batch_size: int, *, is_chosen: bool = False) -> Task:
    """Return the task that FILE:FACTORY describes, on the CPU.

    A module alone gets uniform [0, 1) inputs of the shape that its first linear or convolution layer takes, uniform
    targets of its output's shape, and the mean squared error. Inputs that the factory makes are what the model is called
    with: a tuple holds positional arguments, a dict named ones (`mezzo.proof._inputs.arguments_of`).

    Args:
        reference: FILE:FACTORY.
        batch_size: Samples of a batch that is made here.
        is_chosen: Whether the user asked for this batch size: a factory that takes `batch_size` or **kwargs gets it.

    Raises:
        ModelError: The factory makes nothing usable, or its own batch although another size was chosen.
        RunError: The factory raised.
    """
    factory = find_factory(reference)
    parameter = _batch_size_of(factory)
    takes_any = parameter is not None and parameter.kind is parameter.VAR_KEYWORD
    is_given = parameter is not None and not takes_any and (is_chosen or parameter.default is parameter.empty)
    try:
        made = _made_with(factory, batch_size if is_given else None)
        if (
            is_chosen and takes_any and not isinstance(made, nn.Module)
        ):  # one of a module alone hands **kwargs to the module
            made = _made_with(factory, batch_size)
    except Exception as error:  # whatever the user's code raises, the line says where
        name = reference.rpartition(":")[2]
        raise RunError(f"{find_place(error, reference)}: {name}() raised {type(error).__name__}: {error}") from error
    task = _as_task(made, reference, batch_size)
    if is_given or (is_chosen and takes_any and _has_size(task, batch_size)):
        return replace(task, samples=batch_size)
    if isinstance(made, nn.Module) or not is_chosen:
        return task
    own = "" if task.batch_size is None else f" of {task.batch_size}"
    raise ModelError(
        f"--batch-size {batch_size}: {reference!r} makes its own batch{own}; let the factory take batch_size, or leave "
        "the option out"
    )


def _batch_size_of(factory: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter that takes `batch_size`, by its name or as one of **kwargs."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of C: it has no signature
        return None
    others = (each for each in parameters.values() if each.kind is each.VAR_KEYWORD)
    return parameters.get("batch_size") or next(others, None)


def _made_with(factory: Callable[..., Any], batch_size: int | None = None) -> Any:
    """Call a factory, with `batch_size` by name, or by place where it is positional-only; the same numbers at every call."""
    torch.manual_seed(SEED)
    if batch_size is None:
        return factory()
    parameters = list(inspect.signature(factory).parameters.values())
    by_place = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
    names = [each.name for each in by_place]
    if "batch_size" not in names:
        return factory(batch_size=batch_size)
    before = by_place[: names.index("batch_size")]
    return factory(*(each.default for each in before if each.default is not each.empty), batch_size)


def _has_size(task: Task, size: int) -> bool:
    """Whether any tensor has this size: a factory may ignore what it gets as one of **kwargs."""
    return any(size in leaf.shape for leaf in tree_leaves(task.inputs) if isinstance(leaf, Tensor))


def find_place(error: BaseException, reference: str) -> str:
    """Return 'FILE:line' of the last line of the user's file that the error passed through, else FILE."""
    file = reference.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def find_factory(reference: str, *, option: str = "--model", wanted: str = _WANTED) -> Callable[..., Any]:
    """Return the function that FILE:FACTORY names.

    Args:
        reference: Where it is defined.
        option: That gave the reference, for messages.
        wanted: What the function must return, for messages.

    Raises:
        ModelError: There is no such file or function, or the file cannot be imported.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name:
        raise ModelError(f"{option} {reference!r}: must be FILE:FACTORY, such as net.py:build_model")
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"{option} {reference!r}: there is no file {file!r}")
    module = _import_file(path, reference)
    factory = getattr(module, name, None)
    if factory is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        if not functions:
            raise ModelError(f"{path}: defines no function; {name!r} must be one that returns {wanted}")
        raise ModelError(f"{path}: {unknown_choice('factory', name, functions)}")
    if not callable(factory):
        raise ModelError(f"{path}: {name!r} is a {type(factory).__name__}, must be a function that returns {wanted}")
    return factory  # type: ignore[no-any-return]


def _import_file(path: Path, reference: str) -> Any:
    # loader of its own name: spec_from_file_location alone knows no loader for a file that is not called *.py
    loader = importlib.machinery.SourceFileLoader(f"_mezzo_model_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses and pickle look their module up there
    sys.path.insert(0, str(path.resolve().parent))  # the file's own imports, as `python FILE` would find them
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ModelError(
            f"{find_place(error, reference)}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _as_task(made: Any, reference: str, batch_size: int) -> Task:
    if isinstance(made, nn.Module):
        return _with_data(made, reference, batch_size)
    if not isinstance(made, tuple) or len(made) != 4:
        raise ModelError(f"--model {reference!r}: returned {_describe(made)}, must return {_WANTED}")
    model, inputs, targets, loss_fn = made
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        raise ModelError(f"--model {reference!r}: returned {_describe(made)}, must return {_WANTED}")
    return Task(model, inputs, targets, loss_fn)


def _with_data(model: nn.Module, reference: str, batch_size: int) -> Task:
    shape = _input_shape(model)
    if shape is None:
        advice = "return (module, inputs, targets, loss_fn)"
        raise ModelError(f"--model {reference!r}: has no linear or convolution layer to read its input from; {advice}")
    inputs = torch.rand(batch_size, *shape)
    try:
        with torch.no_grad():
            output = copy.deepcopy(model)(inputs)  # a copy: BatchNorm statistics of the original stay at their start
    except Exception as error:  # whatever the user's forward raises
        advice = "return (module, inputs, targets, loss_fn) to give it its own"
        shown = tuple(inputs.shape)
        raise ModelError(f"--model {reference!r}: does not take inputs of shape {shown}: {error}; {advice}") from error
    if not isinstance(output, Tensor):
        advice = "return (module, inputs, targets, loss_fn) with a loss for it"
        raise ModelError(f"--model {reference!r}: its output is {_describe(output)}, not a tensor; {advice}")
    return Task(model, inputs, torch.rand_like(output), nn.functional.mse_loss, batch_size)


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
