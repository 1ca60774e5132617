"""Errors of downloads."""

from mezzo.errors import RunError
from mezzo.files import FileError


class FetchError(FileError):
    """A URL or a cached file that is refused, independent of the network."""


class Unreachable(RunError):
    """A URL that cannot be downloaded now."""
