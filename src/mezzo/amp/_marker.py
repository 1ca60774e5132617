"""Makes Dynamo compile a function again under another policy.

Dynamo guards torch's autocast state of every device type, but nothing of mezzo. So the number of the current policy is
written into the autocast dtype of device types that mezzo does not support.
"""

import functools
import sys
from collections.abc import Hashable

import torch

from mezzo._torch.autocast_state import MARKER_DEVICES
from mezzo._torch.dynamo import DYNAMO

_FIRST, _SECOND = MARKER_DEVICES


@functools.cache
def _dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that serve as digits of the number."""
    return tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))


_numbers: dict[Hashable, int] = {}


def set_marker(policy: Hashable | None) -> None:
    """Write the number of a policy, or none; do nothing while Dynamo is not loaded."""
    if DYNAMO not in sys.modules:
        return
    if policy is None:
        torch.set_autocast_enabled(_FIRST, False)
        if len(_numbers) > len(_dtypes()):
            torch.set_autocast_enabled(_SECOND, False)
        return
    number = _numbers.get(policy)
    if number is None:
        number = _numbers[policy] = len(_numbers)
    digits = _dtypes()
    if number >= len(digits) ** 2:
        raise RuntimeError(f"more than {len(digits) ** 2} different policies in one process that uses torch.compile")
    torch.set_autocast_enabled(_FIRST, True)
    torch.set_autocast_dtype(_FIRST, digits[number % len(digits)])
    if len(_numbers) > len(digits):
        torch.set_autocast_enabled(_SECOND, number >= len(digits))
        torch.set_autocast_dtype(_SECOND, digits[number // len(digits)])
