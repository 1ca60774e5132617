"""What goes wrong between an exported model and its predictions."""

from mezzo.errors import DeployError, MezzoError

__all__ = ["DeployError", "EngineError"]


class EngineError(MezzoError):
    """An engine that is not there, or not for this."""
