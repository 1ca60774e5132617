"""Files by URL: downloads into a cache."""

from mezzo.fetch._cache import cached, fetch, recorded
from mezzo.fetch._download import Progress, check_request, download
from mezzo.fetch._errors import FetchError, Unreachable
from mezzo.fetch._place import is_offline, is_url, place_of
from mezzo.fetch._show import terminal_progress

__all__ = [
    # The cache
    "fetch",
    "cached",
    "recorded",
    "place_of",
    "is_url",
    "is_offline",
    "Progress",
    "terminal_progress",
    # Files with a known checksum
    "check_request",
    "download",
    # Errors
    "FetchError",
    "Unreachable",
]
