"""The store of the default process group: keys and values that all processes of a run see.

Why: processes tell each other how far they came, so that one line can name a process that hangs. A
store of mezzo's own would need a port of its own.
Releases: 2.11 to 2.15.
Without it: a hung process keeps the others waiting in silence until the time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

default_store: Callable[[], Any] = distributed_c10d._get_default_store
"""Return the store; raises where no group was made."""
