"""Shared by the four programs of this folder: the nine-layer network, its data and the timed run."""

import argparse
import time
from collections.abc import Iterator

import torch
from torch import nn

from mezzo import static


class SimpleNet(nn.Module):
    """Nine linear layers of equal width; with `is_guarded`, all except the first run inside `fp16_guard`."""

    def __init__(self, size: int, is_guarded: bool = False) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(size, size) for _ in range(9))
        for layer in self.linears:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.is_guarded = is_guarded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ninth layer's output."""
        for number, layer in enumerate(self.linears):
            if number > 0 and self.is_guarded:
                with static.amp.fp16_guard():
                    x = layer(x)
            else:
                x = layer(x)
        return x


def read_options(description: str | None) -> argparse.Namespace:
    """Return the options; the default sizes are large on a GPU and small on a CPU."""
    parser = argparse.ArgumentParser(description=description)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", type=int, default=8192 if on_gpu else 256)
    parser.add_argument("--batch-size", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.0001)
    parser.add_argument("--device", default="gpu" if on_gpu else "cpu")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument(
        "--cpu-compute", default="auto", choices=["auto", "native", "float32"], help="how a CPU computes half operators"
    )
    options = parser.parse_args()
    torch.manual_seed(100)
    static.default_main_program().backend = options.backend
    return options


def batches(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same batch of uniform data and labels, on the device, once per step."""
    device = static.Executor(options.device).device
    generator = torch.Generator(device).manual_seed(100)
    data, label = (torch.rand(options.batch_size, options.size, device=device, generator=generator) for _ in range(2))
    for _ in range(options.steps):
        yield data, label


def run(
    options: argparse.Namespace,
    executor: static.Executor,
    data: static.Variable,
    label: static.Variable,
    loss: static.Variable,
) -> None:
    """Train the default program; print the loss, the time per step, and the dtype of the matrix products."""
    program = static.default_main_program()
    times = []
    for train_data, train_label in batches(options):
        start = time.perf_counter()
        (train_loss,) = executor.run(
            program,
            feed={data.name: train_data, label.name: train_label},
            fetch_list=[loss.name],
            use_program_cache=True,
        )
        times.append(time.perf_counter() - start)
    print(f"loss: {train_loss:.6f} {train_loss.dtype}")
    print(
        f"time of a step: {sorted(times)[len(times) // 2] * 1e3:.3f} ms (median; the first, {times[0]:.1f} s, captures)"
    )
    if options.backend != "eager":
        for row in program.operators().rows:
            if row.op == "addmm":
                print(f"{row.module}: {row.fp16} in float16, {row.fp32} in float32")
