"""Shards of DTensors and parameters of FSDP1 are known."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo._torch.sharding import is_of_fsdp1, local_shard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")


def test_the_shard_of_a_dtensor_is_the_tensor_it_was_made_from(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        assert type(local_shard(made)) is torch.Tensor, "DTensor._local_tensor is gone"
        assert local_shard(made).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_flat_parameters_of_fsdp1_are_marked() -> None:
    from torch.distributed.fsdp import _flat_param

    assert not is_of_fsdp1(nn.Parameter(torch.ones(1)))
    text = Path(_flat_param.__file__).read_text(encoding="utf-8")
    for mark in ("_is_flat_param", "_fsdp_flattened"):
        assert mark in text, f"FSDP1 no longer marks its parameters with {mark}"
    flat = nn.Parameter(torch.ones(1))
    flat._is_flat_param = True
    assert is_of_fsdp1(flat)
