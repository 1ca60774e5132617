"""`decorate` and distributed wrappers: decorate first, wrap afterwards."""

from collections.abc import Callable

import pytest
import torch
from decorated import Net, Wrapper, train
from torch import nn

from mezzo.amp import decorate


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda m: nn.DataParallel(m), "found DataParallel at the model itself"),
        (lambda m: Wrapper(nn.DataParallel(m)), "found DataParallel at inner.deep"),
        (lambda m: [nn.Linear(1, 1), nn.DataParallel(m)], r"found DataParallel at models\[1\]"),
    ],
)
def test_wrapped_models_are_refused_before_anything_changes(wrap: Callable, found: str) -> None:
    model = nn.Linear(2, 2)
    message = r"decorate\(\) or Precision.prepare\(\) first, then wrap with DistributedDataParallel; "
    for level in ("O1", "O2"):
        with pytest.raises(RuntimeError, match=message + found):
            decorate(wrap(model), level=level)
    assert model.weight.dtype is torch.float32


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about a group of one process
@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FSDPLinear"])
def test_models_wrapped_for_real_distributed_training_are_refused(kind: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: nn.Module = nn.Linear(2, 2)
        if kind == "DistributedDataParallel":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        advice = (
            "then wrap with DistributedDataParallel" if kind.startswith("D") else r"use Precision.shard\(model\) and .*"
        )
        with pytest.raises(RuntimeError, match=f"{advice}; found {kind} at inner.deep"):
            decorate(Wrapper(model), level="O2")
        assert all(p.dtype is torch.float32 for p in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_decorated_model_trains_inside_distributed_data_parallel(level: str) -> None:
    """Decorate first, wrap afterwards: one gloo process, the same numbers as without the wrapper."""
    import torch.distributed as dist

    def losses(wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
        torch.manual_seed(8)
        model = Net()
        model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
        return train(wrap(model), optimizer, level, torch.float16)

    alone = losses(lambda model: model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert losses(nn.parallel.DistributedDataParallel) == alone
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_sharding_a_decorated_model_warns_that_its_masters_are_gone() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = decorate(nn.Linear(2, 2), level="O2", dtype="bfloat16")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match=r"fully_shard\(\) replaced half parameters of a decorated model"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
