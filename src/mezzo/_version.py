"""Versions of what is installed."""

from importlib import metadata


def version_of(package: str = "mezzo") -> str | None:
    """Return the version of a package; None if it is not installed, as mezzo when it runs from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
