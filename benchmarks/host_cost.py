"""Host cost per operator of mezzo's auto_cast against torch.autocast, with tensors so small that the host is the limit.

Prints the mean over all operators of a transformer block and of an MLP (forward, loss, backward), then every kernel of
ours that default O1 installs, each on inputs that need no cast: what is timed is the kernel, not a cast that the policy
asks for. Kernels are timed three times: alone, with the operator inside taken out; the whole call, as the best of 41
batches of 100 (a warm host); and as the best of 60 batches of 4 calls after a wait. The differences of whole calls are
those of two times up to a hundred times as long: a few microseconds of them are noise.

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
from mezzo.amp import _kernel_table, _kernels
from mezzo.amp._kernel_table import KERNELS

BATCHES = 41
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
    original = _kernel_table.make_kernel

    def make_watched(overload: Any, op: Any, device_type: str) -> Callable[..., Any]:
        kernel = original(overload, op, device_type)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen(overload, args, kwargs)
            return kernel(*args, **kwargs)

        return watched

    KERNELS.uninstall()
    _kernel_table.make_kernel = make_watched
    try:
        yield
    finally:
        _kernel_table.make_kernel = original
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
    alone = _kernel_alone_us(calls, region_of["mezzo O1"], sync)
    warm, cold = _extra_us(calls, region_of, sync, BATCHES, 100), _extra_us(calls, region_of, sync, 60, 4)
    print(f"\nkernels of ours under default O1 on {device}: {len(calls)} timed")
    print(f"  {'':44s} {'alone':>8s}   {'batches of 100, torch -> mezzo':>31s}   {'4 calls after a wait':>31s}")
    for name in sorted(calls, key=lambda name: -alone[name]):
        columns = [f"{stock:8.2f} -> {ours:8.2f} us  {ours - stock:+6.2f}" for stock, ours in (warm[name], cold[name])]
        print(f"  {name:44s} {alone[name]:5.2f} us   {columns[0]}   {columns[1]}")


def _kernel_alone_us(
    calls: dict[str, Callable[[], object]], region: Callable[[], AbstractContextManager], sync: Callable[[], None]
) -> dict[str, float]:
    """Time each kernel with the operator inside it taken out: from the caller through the dispatcher into it and back."""
    results: dict[str, object] = {}
    original = _kernels.callable_of

    def without_operator(overload: Any, op: Any) -> Callable[..., Any]:
        name = overload.name()
        return lambda *args, **kwargs: results[name]

    with torch.no_grad():
        for name, call in calls.items():
            with region():
                results[name] = call()
    KERNELS.uninstall()
    _kernels.callable_of = without_operator
    try:
        with torch.no_grad(), region():
            return {name: min(batch_us(call, 100, sync) for _ in range(BATCHES)) for name, call in calls.items()}
    finally:
        _kernels.callable_of = original
        KERNELS.uninstall()


def _extra_us(
    calls: dict[str, Callable[[], object]],
    region_of: dict[str, Callable[[], AbstractContextManager]],
    sync: Callable[[], None],
    batches: int,
    calls_a_batch: int,
) -> dict[str, tuple[float, float]]:
    """Return the best batch of each call, without and with kernels; they go in and out, so that drift hits both alike."""
    best = {name: [float("inf"), float("inf")] for name in calls}
    for _ in range(batches):
        for place, label in enumerate(("torch.autocast", "mezzo O1")):
            with torch.no_grad(), region_of[label]():
                for name, call in calls.items():
                    best[name][place] = min(best[name][place], batch_us(call, calls_a_batch, sync))
            KERNELS.uninstall()
    return {name: (stock, ours) for name, (stock, ours) in best.items()}


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
