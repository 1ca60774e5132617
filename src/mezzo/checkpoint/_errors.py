"""What goes wrong with a checkpoint."""

from mezzo.errors import MezzoError


class CheckpointError(MezzoError):
    """A checkpoint cannot be read, or what it shall hold cannot be written."""
