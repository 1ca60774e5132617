"""Count the memory of tensors while code runs, also of tensors without memory.

Why: the peak memory of a training step is predicted by running it on fake tensors, which no allocator
counts. A dispatch mode sees every result of an operator, and a storage tells when it is freed.
Releases: 2.11 to 2.15.
Without it: no prediction of peak memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mezzo._torch.modes import UncompiledMode
from mezzo._torch.pytree import tree_leaves
from mezzo._torch.storages import storage_id


class AllocationCounter(UncompiledMode):
    """Inside, counts the bytes of all tensors that operators create, until they are freed.

    Tensors that existed before do not count, nor do temporaries inside an operator, unless a subclass
    knows them (`inside`).
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Start at zero; `known` tensors do not count."""
        super().__init__()
        self.live_bytes = 0
        """Bytes that are in use now."""
        self.peak_bytes = 0
        """The highest that `live_bytes` has been."""
        self._storages: dict[int, weakref.ref[Any] | None] = {}
        for tensor in known:
            self._storages[storage_id(tensor.untyped_storage())] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its results."""
        inputs = {storage_id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for leaf in _tensors(result):
            storage = leaf.untyped_storage()
            identity = storage_id(storage)
            # An input that is not known yet existed before: views and updates in place return it
            if identity in self._storages or identity in inputs:
                continue
            size = storage.nbytes()
            self._storages[identity] = weakref.ref(storage, functools.partial(self._free, identity, size))
            self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self.inside(func, args))
        return result

    def inside(self, operator: Any, args: Any) -> int:
        """Return the bytes of temporaries inside an operator."""
        return 0

    def _free(self, identity: int, size: int, _: weakref.ref[Any]) -> None:
        if self._storages.pop(identity, None) is not None:
            self.live_bytes -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
