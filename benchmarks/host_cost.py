"""Host cost per operator of mezzo's auto_cast against torch.autocast, with tensors so small that the host is the limit.

Prints the mean over all operators of a transformer block and of an MLP (forward, loss, backward), then every kernel of
ours that default O1 installs, each on inputs that need no cast: what is timed is the kernel, not a cast that the policy
asks for.

    PYTHONPATH=src:tests/amp python benchmarks/host_cost.py [--device cuda]
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from op_samples import SAMPLES
from torch import nn

from mezzo import amp
from mezzo.amp import _kernels
from mezzo.amp._kernels import KERNELS

ROUNDS = 300  # short and many: the best of them is what the host can do when nothing disturbs it


def best_us(functions: dict[str, Callable[[], object]], calls: int, sync: Callable[[], None]) -> dict[str, float]:
    """Return the best microseconds a call of each function; the rounds are interleaved, so drift hits all alike."""
    best = dict.fromkeys(functions, float("inf"))
    for number in range(ROUNDS):
        for name in sorted(functions, reverse=number % 2 == 1):
            function = functions[name]
            best[name] = min(best[name], batch_us(function, calls, sync))
    return best


def batch_us(function: Callable[[], object], calls: int, sync: Callable[[], None]) -> float:
    """Return the host's microseconds a call; what the calls queued is waited for afterwards, outside the time."""
    function()
    sync()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = time.perf_counter() - start
    sync()
    return seconds / calls * 1e6


@contextmanager
def watched_kernels(seen: Callable[[Any, tuple, dict], None]) -> Iterator[None]:
    """Install kernels that report each call."""
    original = _kernels.make_kernel

    def make_watched(overload: Any, op: Any, device_type: str) -> Callable[..., Any]:
        kernel = original(overload, op, device_type)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen(overload, args, kwargs)
            return kernel(*args, **kwargs)

        return watched

    KERNELS.uninstall()
    _kernels.make_kernel = make_watched
    try:
        yield
    finally:
        _kernels.make_kernel = original
        KERNELS.uninstall()


def regions(device: str) -> dict[str, Callable[[], AbstractContextManager]]:
    return {
        "torch.autocast": lambda: torch.autocast(device, dtype=torch.float16),
        "torch.autocast again": lambda: torch.autocast(device, dtype=torch.float16),
        "mezzo O1": lambda: amp.auto_cast(level="O1"),
        "mezzo O2": lambda: amp.auto_cast(level="O2"),
    }


def model_rows(device: str, sync: Callable[[], None]) -> None:
    """Time forward and loss, one call after each wait; the backward runs outside the region and is the same for all."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True).to(device)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    for name, model, x in (
        ("transformer block", block, torch.randn(2, 8, 64, device=device)),
        ("MLP", mlp, torch.randn(8, 64, device=device)),
    ):
        steps = {label: _forward(model, x, region) for label, region in regions(device).items()}
        with amp.debugging.collect_operator_stats(print_table=False) as stats:
            steps["torch.autocast"]().backward()
        ops = sum(sum(counts) for counts in stats.totals().values())
        called: dict[str, Counter] = {}
        for label in ("mezzo O1", "mezzo O2"):
            called[label] = Counter()
            with watched_kernels(lambda overload, *_, count=called[label]: count.update([overload.name()])):
                steps[label]()
        only_o1 = tenth_percentile_us({k: v for k, v in steps.items() if k != "mezzo O2"}, sync)
        with_o2 = tenth_percentile_us(steps, sync)
        KERNELS.uninstall()
        print(f"{name}: {ops} ops a step, forward, loss and backward")
        for label, times in (("mezzo O1", only_o1), ("mezzo O2", with_o2)):
            stock = (times["torch.autocast"] + times["torch.autocast again"]) / 2
            print(
                f"  torch.autocast {times['torch.autocast']:.0f} and {times['torch.autocast again']:.0f} us, "
                f"{label} {times[label]:.0f} us: {(times[label] - stock) / ops:+.2f} us an op of the step"
            )
            print(f"    kernels of ours called: {dict(called[label]) or 'none'}")


def tenth_percentile_us(functions: dict[str, Callable[[], object]], sync: Callable[[], None]) -> dict[str, float]:
    """Return the tenth percentile of single calls, interleaved, each on an idle device: a host that is not warmed up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(5 * ROUNDS):
        for name in sorted(functions, reverse=number % 2 == 1):
            sync()
            start = time.perf_counter()
            functions[name]()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: sorted(values)[len(values) // 10] for name, values in times.items()}


def _forward(
    model: nn.Module, x: torch.Tensor, region: Callable[[], AbstractContextManager]
) -> Callable[[], torch.Tensor]:
    target = torch.randn_like(x)

    def forward() -> torch.Tensor:
        with region():
            return nn.functional.mse_loss(model(x), target)

    return forward


def kernel_rows(device: str, sync: Callable[[], None]) -> None:
    """Time each overload that has a kernel of ours under default O1, with the kernel and without it."""
    captured: dict[str, tuple[Any, tuple, dict]] = {}
    with watched_kernels(lambda overload, args, kwargs: captured.setdefault(overload.name(), (overload, args, kwargs))):
        for variant in SAMPLES:
            # Inputs in the dtype the operator computes in.
            dtype = amp.Policy.create("O1").decide(variant, (torch.float16,)).compute
            with torch.device(device), torch.no_grad(), amp.auto_cast(level="O1"):
                SAMPLES[variant](lambda *shape, dtype=dtype: (torch.rand(*shape) * 0.8 + 0.1).to(dtype))
    calls = {name: (lambda o=o, a=a, k=k: o(*a, **k)) for name, (o, a, k) in captured.items()}
    region_of = regions(device)
    for name, call in list(calls.items()):
        try:
            with torch.no_grad(), region_of["torch.autocast"]():
                call()
        except RuntimeError as error:
            print(f"  torch.autocast refuses {name}: {str(error).splitlines()[0][:80]}")
            del calls[name]
    ours, stock = dict.fromkeys(calls, float("inf")), dict.fromkeys(calls, float("inf"))
    for _ in range(60):  # kernels in and out again each round, so that drift hits both alike
        for best, label in ((ours, "mezzo O1"), (stock, "torch.autocast")):
            with torch.no_grad(), region_of[label]():
                for name, call in calls.items():
                    best[name] = min(best[name], batch_us(call, 4, sync))
            KERNELS.uninstall()
    rows = sorted(((ours[name] - stock[name], name) for name in stock), reverse=True)
    print(f"\nkernels of ours under default O1 on {device}: {len(rows)} timed")
    for extra, name in rows:
        print(f"  {name:44s} {stock[name]:8.2f} -> {ours[name]:8.2f} us  {extra:+6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}")
    with torch.no_grad():
        entries = {
            name: (lambda region=region: region().__enter__().__exit__(None, None, None))
            for name, region in regions(device).items()
        }
        print(
            "entering and leaving a region:",
            ", ".join(f"{k} {v:.1f} us" for k, v in best_us(entries, 20, sync).items()),
        )
    model_rows(device, sync)
    kernel_rows(device, sync)


if __name__ == "__main__":
    main()
