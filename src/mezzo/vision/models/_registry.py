"""Networks by name: what there is, and how it is made."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from mezzo.errors import unknown_choice

Factory = Callable[..., nn.Module]
F = TypeVar("F", bound=Factory)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What is known of a network without making it."""

    name: str
    task: str
    """classification or segmentation."""
    input_size: tuple[int, int]
    """Height and width that it is usually given."""
    num_classes: int
    train_outputs: int
    """How many logits it returns in training; evaluation returns the first."""
    head_keys: tuple[str, ...]
    """Beginnings of the names of parameters whose shape depends on the number of classes."""
    aliases: tuple[str, ...] = ()


_factories: dict[str, Factory] = {}
_infos: dict[str, ModelInfo] = {}
_aliases: dict[str, str] = {}


def register(info: ModelInfo) -> Callable[[F], F]:
    """Return a decorator that makes a factory known under the name and aliases of `info`."""

    def add(factory: F) -> F:
        for name in (info.name, *info.aliases):
            if name in _aliases:
                raise ValueError(f"two models are called {name!r}")
            _aliases[name] = info.name
        _factories[info.name], _infos[info.name] = factory, info
        return factory

    return add


def make(name: str, **options: Any) -> nn.Module:
    """Return a new network of the registry."""
    own_name = _find_name(name)
    model = _factories[own_name](**options)
    model.model_name = own_name  # type: ignore[assignment]
    model.head_keys = _infos[own_name].head_keys  # type: ignore[assignment]  # `load_weights` reads it
    return model


def names_and_aliases() -> tuple[str, ...]:
    """Return every name under which a network is known."""
    return tuple(_aliases)


def model_info(name: str) -> ModelInfo:
    """Return what is known of a network, by its name or an alias."""
    return _infos[_find_name(name)]


def _find_name(name: str) -> str:
    """Return the network's own name for a name or alias."""
    if name not in _aliases:
        raise ValueError(unknown_choice("model", name, tuple(_aliases)))
    return _aliases[name]


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all networks that match a shell pattern, sorted.

    >>> list_models("ocr*")
    ['ocrnet_hrnetw18', 'ocrnet_hrnetw48']
    """
    return sorted(fnmatch.filter(_factories, pattern))
