"""What goes wrong with files that come from elsewhere."""

from mezzo._errors import MezzoError, RunError


class FetchError(MezzoError):
    """A URL, a file in the cache or an archive that is refused; the network is not the reason."""


class Unreachable(RunError):
    """A URL that cannot be fetched now."""
