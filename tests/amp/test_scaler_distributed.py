"""Two processes with sharded gradients: both skip when one overflows, and clip by the norm over both."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW

from free_port import free_port

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


def rank_main(rank: int, port: int) -> None:
    """What each process checks; an assertion that fails here fails the spawn."""
    from mezzo.amp import GradScaler

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))

        def parameter(placement) -> nn.Parameter:
            return nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [placement]))

        for make in (SGD, AdamW):
            sharded, replicated = parameter(Shard(0)), parameter(Replicate())
            plain = nn.Parameter(torch.zeros(1))
            optimizer = make([plain, sharded, replicated], lr=1.0, weight_decay=0.0)
            scaler = GradScaler(init_loss_scaling=2.0, decr_every_n_nan_or_inf=1)

            def set_grads(bad_rank: int | None, sharded=sharded, replicated=replicated, plain=plain) -> None:
                value = torch.full((4, 2), 2.0)
                sharded.grad = distribute_tensor(value, mesh, [Shard(0)])
                replicated.grad = distribute_tensor(value, mesh, [Replicate()])
                plain.grad = torch.full((1,), 2.0)
                if bad_rank == rank:
                    sharded.grad.to_local()[0, 0] = math.nan

            # Rank 1 overflows in its shard: no rank steps, both halve the scale.
            set_grads(bad_rank=1)
            scaler.minimize(optimizer)
            assert plain.item() == 0.0
            assert (sharded.to_local() == 0).all()
            assert (replicated.to_local() == 0).all()
            assert (scaler.get_scale(), scaler.skipped_steps) == (1.0, 1)

            # The true norm counts every number once: 8 + 8 + 1 numbers of 2.
            set_grads(bad_rank=None)
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            expected = 2.0 * math.sqrt(17)
            assert abs(norm.item() - expected) < 1e-5, norm
            scaler.minimize(optimizer)
            moved = 2.0 / expected if make is SGD else 1.0
            for param in (sharded.to_local(), replicated.to_local(), plain):
                torch.testing.assert_close(param.detach(), torch.full_like(param.detach(), -moved), rtol=1e-4, atol=0)

            # unscale_ works on the shards.
            set_grads(bad_rank=None)
            scaler.set_init_loss_scaling(4.0)
            scaler.unscale_(optimizer)
            assert (sharded.grad.to_local() == 0.5).all()
        # DDP writes the mean into the gradients after the backward pass: they still carry the scale.
        for is_view in (True, False):
            layer = nn.Linear(2, 2)
            model = nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=is_view)
            optimizer, scaler = SGD(layer.parameters(), lr=0.1), GradScaler()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.minimize(optimizer)
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            with pytest.warns(UserWarning, match="clip_grad_norm_.*loss scale"):
                nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        # The generic path (amsgrad) takes DTensors.
        stepped = parameter(Shard(0))
        optimizer = AdamW([stepped], lr=1.0, weight_decay=0.0, amsgrad=True)
        stepped.grad = distribute_tensor(torch.full((4, 2), 8.0), mesh, [Shard(0)])
        GradScaler(init_loss_scaling=8.0).minimize(optimizer)
        torch.testing.assert_close(stepped.to_local().detach(), torch.full((2, 2), -1.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_found_inf_and_norm_are_combined_over_ranks_where_gradients_are_sharded(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parent}")
    mp.spawn(rank_main, args=(free_port(),), nprocs=2)
