"""Host cost per operator of mezzo's auto_cast against torch.autocast, on a GPU, with tensors so small that the host is
the limit. Prints the mean over a transformer block and an MLP, and every kernel of ours that default O1 installs.

    PYTHONPATH=src:tests/amp python benchmarks/host_cost.py [--device cuda]
"""

import argparse
import time
from collections.abc import Callable

import torch
from op_samples import SAMPLES
from torch import nn

from mezzo import amp
from mezzo.amp._kernels import KERNELS

REPEATS = 15


def host_us(function: Callable[[], object], calls: int, sync: Callable[[], None]) -> float:
    """Return the best microseconds a call over several batches; queued work is waited for between batches only."""
    best = float("inf")
    for _ in range(REPEATS):
        sync()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
    sync()
    return best / calls * 1e6


def count_ops(function: Callable[[], object]) -> int:
    with amp.debugging.collect_operator_stats(print_table=False) as stats:
        function()
    return sum(sum(counts) for counts in stats.totals().values())


def block_rows(device: str, sync: Callable[[], None], level: str) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True).to(device)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    if level == "O2":
        amp.decorate([block, mlp], level="O2")
    for name, model, x in (
        ("transformer block", block, torch.randn(2, 8, 64, device=device)),
        ("MLP", mlp, torch.randn(8, 64, device=device)),
    ):
        target = torch.randn_like(x)

        def train(model=model, x=x, target=target) -> None:
            nn.functional.mse_loss(model(x), target).backward()

        def stock(train=train) -> None:
            with torch.autocast(device, dtype=torch.float16):
                train()

        def ours(train=train) -> None:
            with amp.auto_cast(level=level):
                train()

        ours()
        ops = count_ops(stock if level == "O1" else ours)
        times = {}
        for label, function in (("ours", ours), ("plain", train), ("ours again", ours)):
            if label == "plain" and level == "O2":
                continue
            times[label] = host_us(function, 50, sync)
        KERNELS.uninstall()
        if level == "O1":
            times["torch.autocast"] = host_us(stock, 50, sync)
            times["torch.autocast again"] = host_us(stock, 50, sync)
            ours_best, stock_best = (min(v for k, v in times.items() if k.startswith(p)) for p in ("ours", "torch"))
            print(f"{name} {level}: {ops} ops a step, mean over torch.autocast {(ours_best - stock_best) / ops:+.2f} us an op")
        print("   ", ", ".join(f"{k} {v:.0f} us" for k, v in times.items()))
        with amp.auto_cast(level=level):
            pass


def kernel_rows(device: str, sync: Callable[[], None]) -> None:
    """Time every variant that has a kernel of ours under default O1, with the kernel and without it."""
    KERNELS.uninstall()
    with amp.auto_cast(level="O1"):
        pass
    ours = {op.name for (kind, _), op in KERNELS.installed.items() if kind == device}
    variants = [variant for variant in SAMPLES if variant.split(".")[0] in ours]
    timed = {}
    for kernels in ("with", "without"):
        for variant in variants:
            with torch.device(device):
                timed[variant, kernels] = _sample_us(variant, device, sync, ours=kernels == "with")
        KERNELS.uninstall()
    print(f"\nkernels of ours under default O1 on {device}: {len(ours)} operators, {len(variants)} variants timed")
    rows = sorted(
        ((timed[v, "with"] - timed[v, "without"], v) for v in variants if timed[v, "without"] is not None), reverse=True
    )
    for extra, variant in rows:
        print(f"  {variant:36s} {timed[variant, 'without']:7.2f} -> {timed[variant, 'with']:7.2f} us  {extra:+6.2f}")
    refused = [v for v in variants if timed[v, "without"] is None]
    print("  torch.autocast refuses:", ", ".join(refused) or "none")


def _sample_us(variant: str, device: str, sync: Callable[[], None], *, ours: bool) -> float | None:
    made: list[torch.Tensor] = []
    # Inputs in the dtype the operator computes in: the cost of the kernel, not of casts that the policy asks for.
    dtype = amp.Policy.create("O1").decide(variant, (torch.float16,)).compute
    position = [0]

    def t(*shape: int) -> torch.Tensor:
        if len(made) <= position[0]:
            made.append((torch.rand(*shape) * 0.8 + 0.1).to(dtype))
        position[0] += 1
        return made[position[0] - 1]

    def call() -> None:
        position[0] = 0
        SAMPLES[variant](t)

    region = amp.auto_cast(level="O1") if ours else torch.autocast(device, dtype=torch.float16)
    try:
        with torch.no_grad(), region:
            call()
            return host_us(call, 100, sync)
    except RuntimeError as error:
        if ours:
            raise
        print(f"  torch.autocast, {variant}: {str(error).splitlines()[0][:90]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    for level in ("O1", "O2"):
        block_rows(device, sync, level)
    kernel_rows(device, sync)


if __name__ == "__main__":
    main()
