"""The interface of engines: a batch of images in, the output of the network out."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mezzo.errors import MezzoError, RunError
from mezzo.export._errors import EngineError

T = TypeVar("T")

Images = NDArray[np.float32]
EngineOutput = NDArray[Any]

KEPT_SHAPES = 8
"""Number of input shapes that an engine keeps prepared."""


class Engine(Protocol):
    """A loaded network."""

    def run(self, images: Images) -> EngineOutput:
        """Return the output (labels, probabilities or logits) for images (n, 3, h, w)."""
        ...


class Guarded:
    """An engine that accepts any float32 array and raises only RunError.

    Args:
        engine: What does the work.
        name: For messages.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images.

        Raises:
            RunError: The engine fails: out of memory, or the network takes no images of this size.
        """
        whole = np.require(images, np.float32, ["C", "W"])
        try:
            return self._engine.run(whole)
        except MezzoError:
            raise
        except Exception as error:  # every engine has its own exceptions
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"{self._name} cannot run images of {images.shape}: {reason}") from error


class PerShape(Generic[T]):
    """A cache of prepared objects for the last input shapes."""

    def __init__(self, prepare: Callable[..., T], most: int = KEPT_SHAPES) -> None:
        self._prepare, self._most = prepare, most
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, shape: tuple[int, ...]) -> T:
        """Return the object of a shape; the least recently used shape is dropped."""
        if shape not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            self._kept[shape] = self._prepare(shape)
        self._kept.move_to_end(shape)
        return self._kept[shape]


def need(module: str, package: str) -> None:
    """Raise an EngineError with the package to install if a module is missing."""
    if importlib.util.find_spec(module) is None:
        raise EngineError(f"this engine needs {module}, which is not installed: pip install {package}")
