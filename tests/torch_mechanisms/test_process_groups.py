"""The store of the default group: processes read what others wrote."""

import pytest
import torch.distributed as dist

from mezzo._torch.process_groups import default_store

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def test_the_default_store_keeps_values_and_has_a_second_connection(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("mezzo/a", "1")
        other = default_store().clone()
        assert other.check(["mezzo/a"])
        assert other.get("mezzo/a") == b"1"
        assert not other.check(["mezzo/b"])
    finally:
        dist.destroy_process_group()


def test_without_a_group_there_is_no_store():
    with pytest.raises((ValueError, RuntimeError)):
        default_store()
