"""What is wrong with a data set, in one line that names the file."""

from mezzo.errors import MezzoError


class DataError(MezzoError):
    """A file, list or folder of images cannot be used as it is."""
