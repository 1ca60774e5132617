"""The error for untrusted files."""

from mezzo.errors import MezzoError


class FileError(MezzoError):
    """A file that is missing, damaged, too large, or of another format than its name says."""
