"""Shared by the four programs of this folder: the nine-layer network, its data, and timed steps."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mezzo import amp


class SimpleNet(nn.Module):
    """Nine linear layers of equal width."""

    def __init__(self, size: int) -> None:
        super().__init__()
        layers = [nn.Linear(size, size) for _ in range(9)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.linears = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ninth layer's output."""
        for layer in self.linears:
            x = layer(x)
        return x


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of all four programs; the default sizes are large on a GPU and small on a CPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", type=int, default=8192 if on_gpu else 256, help="width of each layer")
    parser.add_argument(
        "--batch-size", type=int, default=2048 if on_gpu else 64, help="samples per batch; multiples of 8 are fast"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=10, help="batches per epoch")
    parser.add_argument("--lr", type=float, default=0.0001)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--cpu-compute", default="auto", choices=["auto", "native", "float32"], help="how a CPU computes half operators"
    )
    return parser


def make_model(options: argparse.Namespace) -> SimpleNet:
    """Return the network on the device, with the same weights at every call."""
    torch.manual_seed(100)
    return SimpleNet(options.size).to(options.device)


def batches(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of uniform data and labels, on the device; the same ones in every epoch."""
    for _ in range(options.epochs):
        generator = torch.Generator(options.device).manual_seed(100)
        for _ in range(options.batches):
            data, label = (
                torch.rand(options.batch_size, options.size, device=options.device, generator=generator)
                for _ in range(2)
            )
            yield data, label


class Steps:
    """Losses and times of training steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a step. The step reads its loss at the end, so the device has finished too."""
        start = time.perf_counter()
        yield
        self.times.append(time.perf_counter() - start)

    def show(self, forward: Callable[[], torch.Tensor]) -> None:
        """Print losses, times, the dtype of the output, and the dtype of the matrix products.

        A CPU without half arithmetic computes products in float32 on half inputs, unless --cpu-compute is native.
        """
        print(f"loss: {self.losses[0]:.6f} at first, {self.losses[-1]:.6f} at last")
        print(f"time of a step: {statistics.median(self.times) * 1e3:.3f} ms (median of {len(self.times)})")
        with torch.no_grad(), amp.debugging.collect_operator_stats(print_table=False) as stats:
            output = forward()
        fp16, _, fp32, _ = stats.totals()["addmm"]
        print(f"output: {output.dtype}; matrix products: {fp16} in float16, {fp32} in float32")
