"""The registry: networks by name."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from mezzo.errors import unknown_choice

Factory = Callable[..., nn.Module]
F = TypeVar("F", bound=Factory)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What the registry knows about a network without creating it."""

    name: str
    task: str
    """classification or segmentation."""
    input_size: tuple[int, int]
    """Usual height and width of the input."""
    num_classes: int
    train_outputs: int
    """Number of logits tensors in training; evaluation returns only the first."""
    head_keys: tuple[str, ...]
    """Prefixes of the parameters whose shape depends on the number of classes."""
    aliases: tuple[str, ...] = ()


_factories: dict[str, Factory] = {}
_infos: dict[str, ModelInfo] = {}
_aliases: dict[str, str] = {}


def register_model(
    *,
    task: str,
    input_size: tuple[int, int],
    head_keys: tuple[str, ...],
    train_outputs: int = 1,
    aliases: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Return a decorator that adds a factory to the registry.

    The name is that of the factory, the number of classes the default of its argument `num_classes`. See `ModelInfo` for
    the other fields.
    """

    def add(factory: F) -> F:
        name = factory.__name__
        for each in (name, *aliases):
            if each in _aliases:
                raise ValueError(f"two models are called {each!r}")
            _aliases[each] = name
        _factories[name] = factory
        _infos[name] = ModelInfo(
            name=name,
            task=task,
            input_size=input_size,
            num_classes=inspect.signature(factory).parameters["num_classes"].default,
            train_outputs=train_outputs,
            head_keys=head_keys,
            aliases=aliases,
        )
        return factory

    return add


def create_registered(name: str, **options: Any) -> nn.Module:
    """Return a new network of the registry, by its name or an alias."""
    return tag_model(_factories[_find_name(name)](**options), name)


def tag_model(model: nn.Module, name: str) -> nn.Module:
    """Set the attributes of a network that `load_weights` and exports read: `model_name` and `head_keys`."""
    info = model_info(name)
    model.model_name = info.name  # type: ignore[assignment]
    model.head_keys = info.head_keys  # type: ignore[assignment]
    return model


def names_and_aliases() -> tuple[str, ...]:
    """Return the names and aliases of all networks."""
    return tuple(_aliases)


def model_info(name: str) -> ModelInfo:
    """Return what the registry knows about a network, by its name or an alias.

    Raises:
        ValueError: There is no such network; the message suggests the nearest name.
    """
    return _infos[_find_name(name)]


def _find_name(name: str) -> str:
    if name not in _aliases:
        raise ValueError(unknown_choice("model", name, tuple(_aliases)))
    return _aliases[name]


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all networks that match a shell pattern, sorted.

    >>> list_models("ocr*")
    ['ocrnet_hrnetw18', 'ocrnet_hrnetw48']
    """
    return sorted(fnmatch.filter(_factories, pattern))
