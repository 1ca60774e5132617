"""Storages are told apart by what weak references to them know."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mezzo._torch.storages import storage_id


def test_views_share_an_identity_and_copies_do_not() -> None:
    x = torch.ones(4)
    own = storage_id(x.untyped_storage())
    assert storage_id(x[1:].untyped_storage()) == own
    assert storage_id(x.clone().untyped_storage()) != own
    assert StorageWeakRef(x.untyped_storage()).cdata == own, "StorageWeakRef has another identity than the storage"
