"""FSDP1, where each rank sees a part of the gradients as plain tensors: refused, with the way out. FSDP2 works."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.optim import SGD

from free_port import free_port
from mezzo.amp import GradScaler
from mezzo.optim import attach

# Gradients are made by hand here, without a loss.
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore:.*before any scale"),
]

REFUSAL = r"FullyShardedDataParallel \(FSDP1\).*torch.distributed.fsdp.fully_shard \(FSDP2\), which mezzo supports"


@pytest.mark.parametrize("attribute", ["_is_flat_param", "_fsdp_flattened"])  # use_orig_params: False, True
def test_parameters_of_fsdp1_are_refused_with_several_ranks(attribute: str, monkeypatch) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    setattr(weights[1], attribute, True)
    for weight in weights:
        weight.grad = torch.ones(2)
    GradScaler().step(SGD(weights, lr=0.1))  # one process has all of it
    monkeypatch.setattr("mezzo.optim._engine.has_several_ranks", lambda: True)
    optimizer = SGD(weights, lr=0.1)
    calls = [
        GradScaler().step,
        GradScaler().minimize,
        GradScaler().unscale_,
        lambda optimizer: GradScaler().clip_grad_norm_(optimizer, 1.0),
        lambda optimizer: GradScaler(enable=False).clip_grad_norm_(optimizer, 1.0),
        attach,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=REFUSAL) as raised:
            call(optimizer)
        assert "\n" not in str(raised.value)
    GradScaler(enable=False).step(optimizer)  # no skip, no norm: the plain step
    GradScaler().step(SGD(weights[:1], lr=0.1))


def test_parameters_are_looked_at_once_per_optimizer(monkeypatch) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    looks: list[int] = []
    monkeypatch.setattr("mezzo.optim._engine.has_several_ranks", lambda: True)
    monkeypatch.setattr("mezzo.optim._engine.is_of_fsdp1", lambda _param: bool(looks.append(1)))
    optimizer, scaler = SGD([weight], lr=0.1), GradScaler()
    for _ in range(3):
        scaler.minimize(optimizer)
    assert len(looks) == 1


def rank_main(rank: int, port: int) -> None:
    """What each process checks; an assertion that fails here fails the spawn."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for use_orig_params in (False, True):
            model = FullyShardedDataParallel(
                nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=torch.device("cpu")
            )
            optimizer = SGD(model.parameters(), lr=0.1)
            scaler = GradScaler()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            for call in (scaler.step, scaler.unscale_):
                with pytest.raises(RuntimeError, match=REFUSAL):
                    call(optimizer)
        sharded = nn.Linear(4, 4)
        fully_shard(sharded)
        optimizer, scaler = SGD(sharded.parameters(), lr=0.1), GradScaler()
        before = sharded.weight.to_local().detach().clone()
        scaler.scale(sharded(torch.ones(2, 4)).sum()).backward()
        scaler.minimize(optimizer)
        assert not torch.equal(sharded.weight.to_local(), before)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused_and_fsdp2_steps_in_two_processes(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parent}")
    mp.spawn(rank_main, args=(free_port(),), nprocs=2)
