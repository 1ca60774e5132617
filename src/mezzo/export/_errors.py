"""Errors of exported models and engines."""

from mezzo.errors import DeployError, MezzoError

__all__ = ["DeployError", "EngineError"]


class EngineError(MezzoError):
    """An engine that is not installed, or cannot run this model."""
