"""What goes wrong with a file that comes from outside."""

from mezzo.errors import MezzoError


class FileError(MezzoError):
    """A file that is missing, damaged, too large, or not what its name says."""
