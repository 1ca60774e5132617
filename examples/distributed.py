"""Train one network in several processes at O2: prepare first, wrap with DDP afterwards.

python examples/distributed.py                                       # starts two processes itself
torchrun --nproc_per_node=2 examples/distributed.py --level O1       # the usual way
"""

import argparse
import gc
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mezzo


def read_options() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2", choices=["O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="width of the network")
    has_two = torch.cuda.device_count() >= 2
    parser.add_argument("--device", default="cuda" if has_two else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--wrap-first", action="store_true", help="wrap before preparing, to show the error")
    return parser.parse_args()


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
    data = torch.randn(128, size, generator=torch.Generator().manual_seed(seed)).to(device)
    return data, data.roll(1, dims=1).tanh()


def main(options: argparse.Namespace) -> int:
    """Build, prepare, wrap, train, compare; return the exit code."""
    device = enter_group(options.device)
    rank, processes, size = dist.get_rank(), dist.get_world_size(), options.size
    torch.manual_seed(rank)  # different weights per process: DDP broadcasts those of rank 0
    model: nn.Module = nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = mezzo.Precision(options.level, options.dtype)
    if options.wrap_first:
        try:
            precision.prepare(DistributedDataParallel(model), optimizer)
        except RuntimeError as error:
            print(f"process {rank}: {error}")
        return 0
    model, optimizer = precision.prepare(model, optimizer)  # 1. half weights
    model = DistributedDataParallel(model)  # 2. the wrapper

    for step in range(options.steps):  # each process has its own data, and DDP averages the gradients
        data, target = make_batch(size, 1 + rank + step * processes, device)
        with precision.autocast():
            loss = nn.functional.mse_loss(model(data), target)
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        if rank == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {loss.item():.6f}")

    data, target = make_batch(size, 0, device)  # the same batch everywhere: equal weights give equal losses
    with torch.no_grad(), precision.autocast():
        loss = nn.functional.mse_loss(model(data), target)
    losses = [torch.zeros_like(loss) for _ in range(processes)]
    dist.all_gather(losses, loss)
    are_equal = all(torch.equal(one, losses[0]) for one in losses)
    if rank == 0:
        for number, one in enumerate(losses):
            print(f"process {number}: loss {one.item():.9f} on the same batch, {loss.dtype}")
        print(f"{dist.get_backend()}: the losses are {'equal' if are_equal else 'NOT equal'}")
    return 0 if are_equal else 1


if __name__ == "__main__":
    options = read_options()
    if "RANK" not in os.environ:  # not started by torchrun
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        sys.exit(subprocess.run([*launcher, __file__, *sys.argv[1:]], check=False).returncode)
    code = main(options)
    gc.collect()  # frees DDP, which has reference cycles, before its process group goes
    dist.destroy_process_group()
    sys.exit(code)
