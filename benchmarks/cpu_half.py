"""Heavy operators on a CPU, forward and backward: float32, mezzo's auto_cast and torch.autocast in both half dtypes.

PYTHONPATH=src python benchmarks/cpu_half.py [--rounds 15]
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch
from torch import nn

from mezzo import amp
from mezzo.amp import has_half_units

CASES = {
    "conv 3x3 64->64, 56x56, batch 8": (lambda: nn.Conv2d(64, 64, 3, padding=1), lambda: torch.randn(8, 64, 56, 56)),
    "linear 1024->1024, batch 512": (lambda: nn.Linear(1024, 1024), lambda: torch.randn(512, 1024)),
}


def modes(layer: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], None]]:
    def step(region: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with region():  # type: ignore[attr-defined]
                out = layer(x)
            out.backward(torch.ones_like(out))
            layer.zero_grad()
            x.grad = None

        return run

    table = {"float32": step(lambda: amp.auto_cast(enable=False))}
    for half in ("float16", "bfloat16"):
        table[f"mezzo O1 {half}, as the probe decides"] = step(lambda half=half: amp.auto_cast(dtype=half))
        for compute in ("float32", "native"):
            region = amp.auto_cast(dtype=half, cpu_compute=compute)
            table[f"mezzo O1 {half}, cpu_compute={compute}"] = step(lambda region=region: region)
        dtype = getattr(torch, half)
        table[f"torch.autocast {half}"] = step(lambda dtype=dtype: torch.autocast("cpu", dtype=dtype))
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print("half units by the probe:", {str(d): has_half_units(d) for d in (torch.float16, torch.bfloat16)})
    for name, (make, data) in CASES.items():
        table = modes(make(), data().requires_grad_())
        best = dict.fromkeys(table, float("inf"))
        for _ in range(rounds):  # interleaved, so that drift hits all alike
            for label, run in table.items():
                start = time.perf_counter()
                run()
                best[label] = min(best[label], time.perf_counter() - start)
        print(name)
        for label, seconds in best.items():
            print(f"  {label:44s} {seconds * 1e3:8.2f} ms  {seconds / best['float32']:6.2f}x float32")


if __name__ == "__main__":
    main()
