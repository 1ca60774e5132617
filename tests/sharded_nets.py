"""A small language model for tests of FSDP2, its training loop, and processes that run a function together."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from free_port import free_port
from mezzo.amp import GradScaler
from mezzo.precision import Precision

STEPS, BATCH, LENGTH, WORDS, WIDTH = 8, 8, 8, 32, 16
FP8: dict[str, Any] = {"emulate": True, "min_width": 0, "min_size": 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model without attention: embedding, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.is_checkpointed = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(self.norm(x))


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return tokens, (tokens * 7 + 3) % WORDS


def make(level: str, dtype: str, *, is_sharded: bool, **options: Any) -> tuple[Any, torch.optim.Optimizer, Precision]:
    torch.manual_seed(0)
    net = Net()
    net.is_checkpointed = options.pop("is_checkpointed", False)
    sharding = {"gather_fp8": True} if options.pop("gather_fp8", False) else {}
    if level == "O3":
        options["fp8"] = FP8
    scaler = GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1) if dtype == "float16" else None
    precision = Precision(level, dtype, scaler=scaler, **options)
    if is_sharded:
        precision.shard(net, blocks="layers.?", **sharding)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision.prepare(net, optimizer)
    return net, optimizer, precision


def train(
    made: tuple[Any, torch.optim.Optimizer, Precision],
    rank: int = 0,
    size: int = 1,
    steps: range = range(STEPS),
    breaks: Callable[[int, Tensor], Tensor] = lambda number, loss: loss,
) -> list[float]:
    """Train on this process's part of each batch; return the losses of whole batches."""
    net, optimizer, precision = made
    losses = []
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    for number in steps:
        tokens, targets = (each[part] for each in batch_of(number))
        with precision.autocast():
            loss = cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
        precision.backward(breaks(number, loss))
        precision.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
        shared = loss.detach().clone()
        if size > 1:
            dist.all_reduce(shared)
        losses.append(shared.item() / size)
    return losses


def _worker(rank: int, size: int, port: int, out: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    result = work(rank, size, *arguments)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads end their work: see docs/distributed.md


def run(size: int, tmp_path: Path, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in several processes; return the result of the first."""
    out = tmp_path / "result.json"
    mp.start_processes(_worker, (size, free_port(), str(out), work, arguments), nprocs=size, start_method="spawn")
    return json.loads(out.read_text())


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "precision": precision.state_dict(),
    }
