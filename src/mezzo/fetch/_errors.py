"""What goes wrong with files that come from elsewhere."""

from mezzo.errors import RunError
from mezzo.files import FileError


class FetchError(FileError):
    """A URL or a file in the cache that is refused; the network is not the reason."""


class Unreachable(RunError):
    """A URL that cannot be fetched now."""
