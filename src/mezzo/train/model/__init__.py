"""The high-level API."""

from mezzo.train.model._model import Model

__all__ = ["Model"]
