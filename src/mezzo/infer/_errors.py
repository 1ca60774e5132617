"""What goes wrong between an exported model and its predictions."""

from mezzo._errors import MezzoError


class DeployError(MezzoError):
    """An exported model that cannot be used as it is."""


class EngineError(MezzoError):
    """An engine that is not there, or not for this."""
