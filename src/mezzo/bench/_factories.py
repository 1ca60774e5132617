"""FILE:FACTORY references: import the user's file and call its function."""

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.errors import MezzoError, unknown_choice

WORKLOAD_WANTED = "an nn.Module or (module, inputs, targets, loss_fn)"


class ModelError(MezzoError):
    """FILE:FACTORY names no usable model or data loader."""


def find_place(error: BaseException, reference: str) -> str:
    """Return FILE:LINE of the last line of the user's file in the traceback, or FILE if there is none."""
    file = reference.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def find_factory(reference: str, *, option: str = "--model", wanted: str = WORKLOAD_WANTED) -> Callable[..., Any]:
    """Return the function that FILE:FACTORY names.

    Args:
        reference: FILE:FACTORY.
        option: The option that gave the reference, for messages; may be empty.
        wanted: What the function must return, for messages.

    Raises:
        ModelError: There is no such file or function, or the file cannot be imported.
    """
    label = f"{option} {reference!r}".lstrip()
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name:
        raise ModelError(f"{label}: must be FILE:FACTORY, such as net.py:build_model")
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"{label}: there is no file {file!r}")
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
    # An explicit loader: spec_from_file_location finds none for a file without the suffix .py.
    loader = importlib.machinery.SourceFileLoader(f"_mezzo_model_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses and pickle look up their module there
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours, as with `python FILE`
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ModelError(
            f"{find_place(error, reference)}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def batch_size_parameter(factory: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter that accepts `batch_size`: the one of that name, otherwise **kwargs, otherwise None."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a C function without a signature
        return None
    keywords = (each for each in parameters.values() if each.kind is each.VAR_KEYWORD)
    return parameters.get("batch_size") or next(keywords, None)


def call_factory(factory: Callable[..., Any], batch_size: int | None) -> Any:
    """Call a factory, with `batch_size` unless it is None; by position where the parameter is positional-only."""
    if batch_size is None:
        return factory()
    parameters = list(inspect.signature(factory).parameters.values())
    positional = [each for each in parameters if each.kind is each.POSITIONAL_ONLY]
    names = [each.name for each in positional]
    if "batch_size" not in names:
        return factory(batch_size=batch_size)
    before = positional[: names.index("batch_size")]
    return factory(*(each.default for each in before if each.default is not each.empty), batch_size)
