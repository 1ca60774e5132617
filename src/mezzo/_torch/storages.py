"""The identity of a tensor's memory.

Why: two tensors share memory if and only if their storages have the same identity.
`StorageWeakRef.cdata`, to which it is compared, has no public counterpart on the storage itself; an
address may be used again by another storage.
Releases: 2.11 to 2.15.
Without it: FP8 copies of a weight outlive the weight, and graphs drop masks that are written through a view.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

storage_id: Callable[[Any], int] = attrgetter("_cdata")
"""Return the identity of a storage, from `tensor.untyped_storage()`."""
