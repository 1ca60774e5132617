"""Log lines in the format of the Paddle documents."""

from datetime import datetime


def stamped(line: str, when: datetime) -> str:
    r"""Return a line with date and time in front of it.

    >>> stamped("[TRAIN] epoch: 1", datetime(2022, 4, 13, 11, 43, 9))
    '2022-04-13 11:43:09 [INFO]\t[TRAIN] epoch: 1'
    """
    return f"{when:%Y-%m-%d %H:%M:%S} [INFO]\t{line}"
