"""Train one network in several processes at O2: decorate first, wrap afterwards.

torchrun --nproc_per_node=2 examples/distributed.py
"""

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo import amp


def read_options() -> argparse.Namespace:
    """Return the options; exit with 2 unless `torchrun` started this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2", choices=["O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="width of the network")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--wrap-first", action="store_true", help="wrap before decorating, to show the error")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("no torchrun: start it with torchrun --nproc_per_node=2 examples/distributed.py")
    return options


def enter_group(name: str) -> torch.device:
    """Join the process group (NCCL on GPUs, gloo on CPUs); return the device of this process."""
    if name == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make_batch(size: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(128, size, generator=generator).to(device)
    return data, data.roll(1, dims=1).tanh()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, device: torch.device
) -> None:
    """Train; each process has its own data, and DDP averages the gradients."""
    scaler = amp.GradScaler(enable=options.dtype == "float16")
    rank, processes = dist.get_rank(), dist.get_world_size()
    for step in range(options.steps):
        data, target = make_batch(options.size, 1 + rank + step * processes, device)
        with amp.auto_cast(level=options.level, dtype=options.dtype):
            loss = nn.functional.mse_loss(model(data), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if rank == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {loss.item():.6f}")


def compare(model: nn.Module, options: argparse.Namespace, device: torch.device) -> bool:
    """Return whether the losses of all processes on one batch are equal; the first process prints them."""
    data, target = make_batch(options.size, 0, device)
    with torch.no_grad(), amp.auto_cast(level=options.level, dtype=options.dtype):
        loss = nn.functional.mse_loss(model(data), target)
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    are_equal = all(torch.equal(one, losses[0]) for one in losses)
    if dist.get_rank() == 0:
        for number, one in enumerate(losses):
            print(f"process {number}: loss {one.item():.9f} on the same batch, {loss.dtype}")
        print(f"{dist.get_backend()}: the losses are {'equal' if are_equal else 'NOT equal'}")
    return are_equal


def show_refusal(model: nn.Module, options: argparse.Namespace) -> None:
    """Wrap first, and print the error."""
    try:
        amp.decorate(DistributedDataParallel(model), level=options.level, dtype=options.dtype)
    except RuntimeError as error:
        print(f"process {dist.get_rank()}: {error}")


def main() -> int:
    """Build, decorate, wrap, train, compare; return the exit code."""
    options = read_options()
    device = enter_group(options.device)
    torch.manual_seed(dist.get_rank())  # different weights per process: DDP broadcasts those of rank 0
    size = options.size
    model: nn.Module = nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.wrap_first:
        show_refusal(model, options)
        return 0
    model, optimizer = amp.decorate(model, optimizer, level=options.level, dtype=options.dtype)  # 1. half weights
    model = DistributedDataParallel(model)  # 2. the wrapper
    train(model, optimizer, options, device)
    return 0 if compare(model, options, device) else 1


if __name__ == "__main__":
    code = main()
    gc.collect()  # frees DDP, which has reference cycles, before its process group goes
    dist.destroy_process_group()
    sys.exit(code)
