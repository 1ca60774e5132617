"""Shards of DTensors and parameters of FSDP1 are known."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mezzo._torch.sharding import is_converted, is_of_fsdp1, local_shard, sharded_weights

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


@pytest.mark.filterwarnings("ignore")  # of torch.distributed, about groups of one process
def test_functions_on_a_shard_convert_it_before_and_after_it_is_gathered(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    calls: list[str] = []

    def before(mesh: object, size: object, stride: object, module: object, policy: object) -> tuple[object, None]:
        calls.append("before")
        return (weight.shard.detach() + 1,), None

    def after(outputs: tuple[torch.Tensor], metadata: None, dtype: torch.dtype, *, out: object = None) -> object:
        calls.append("after")
        return None if out is not None else (outputs[0], ())

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = fully_shard(nn.Linear(2, 3, bias=False))
        nn.init.zeros_(net.weight)
        weight = sharded_weights(net)[id(net.weight)]
        assert (weight.rows, weight.group.size(), is_converted(net.weight)) == (3, 1, False)
        weight.convert(before, after)
        assert is_converted(net.weight), "FSDP2 no longer looks for functions on the shard"
        assert net(torch.ones(1, 2)).tolist() == [[2, 2, 2]]
        net.reshard()
        assert type(local_shard(net.weight)) is torch.Tensor
        assert local_shard(net.weight).tolist() == [[0, 0]] * 3
        assert calls == ["before", "after"]
        net.load_state_dict({"weight": net.state_dict()["weight"].clone()}, assign=True)
        assert is_converted(net.weight), "FSDP2 no longer calls reset_sharded_param for a new shard"
    finally:
        dist.destroy_process_group()
