"""Predicted beside measured peak memory of training steps: `mezzo.proof.predict_memory` and torch's allocator.

python benchmarks/memory.py                 # on a GPU: one table, in about a minute
python benchmarks/memory.py --device cpu    # small networks; the allocator's events come from torch's profiler

A row is one network at one precision with AdamW. The step is eager, not captured, and is the third: masters and the
optimizer's state exist.
"""

import argparse
import copy
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import mezzo
from mezzo.bench import find_workload
from mezzo.errors import MezzoError
from mezzo.fp8 import recipe_for
from mezzo.proof import MemoryPrediction, predict_memory
from mezzo.report import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from train import loss_of

from model import Block, Llama, Size

GIB = 2**30
PRECISIONS: dict[str, dict[str, Any]] = {
    "O0": {},
    "O1": {},
    "O2": {},
    "O2 compact": {"master_weight": "compact"},
    "O2 compact, bf16 state": {"master_weight": "compact", "optimizer_state": "bfloat16"},
    "O3": {},
}


class Gpt(nn.Module):
    """GPT-2 by its shapes: learned positions, LayerNorm, GELU, one matrix for embedding and head."""

    def __init__(self, width: int, layers: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, words]."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for [batch, length, width]."""
        split = self.into(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


@dataclass
class Network:
    """A model to build, its batch and its loss."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]


def token_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the next tokens."""
    return cross_entropy(logits.flatten(0, 1), following.flatten())


def llama(size: Size, words: int, length: int, recompute: bool) -> nn.Module:
    """Return a Llama, with checkpointed blocks if asked for."""
    model = Llama(size, words, length)
    if recompute:
        mezzo.amp.checkpoint_blocks(model, Block)
    return model


def networks(is_small: bool) -> Iterator[Network]:
    """Yield the networks; small ones for a CPU."""
    rows, length = (2, 64) if is_small else (8, 1024)
    words = 512 if is_small else 32000
    tokens = torch.randint(words, (rows, length + 1))
    inputs, following = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    shape = (64, 2, 4) if is_small else (768, 12, 12)
    yield Network("gpt2-like", lambda: Gpt(*shape, words, length), inputs, following, token_loss)
    size = Size(64, 192, 2, 4, 2) if is_small else Size(2048, 8192, 4, 32, 8)
    for recompute in (False, True):
        name = "llama, recomputed" if recompute else "llama"
        yield Network(name, functools.partial(llama, size, words, length, recompute), inputs, following, loss_of)
    for name, batch, side in (("mobilenet_v3_small", 256, 224), ("pp_liteseg_stdc1", 16, 512)):
        work = find_workload(name, 2 if is_small else batch, 64 if is_small else side, is_chosen=True)
        yield Network(name, lambda m=work.model: m, work.inputs, work.targets, work.loss_fn)


def make_precision(name: str, device: torch.device) -> mezzo.Precision:
    """Return a precision of the table."""
    level = name.split()[0]
    fp8 = recipe_for(device, None) if level == "O3" else None
    return mezzo.Precision(level, "bfloat16", fp8=fp8, **PRECISIONS[name])


def predict(network: Network, precision: mezzo.Precision, device: torch.device) -> MemoryPrediction:
    """Return the prediction for AdamW."""
    with torch.device("meta"):  # shapes are enough
        model = network.build()
    return predict_memory(
        model, network.inputs, network.targets, network.loss_fn,
        precision=precision, optimizer="adamw", device=device,
    )  # fmt: skip


def measure(network: Network, precision: mezzo.Precision, device: torch.device) -> int:
    """Return the peak of a third step on a GPU; on a CPU, that of its forward and backward pass besides what is kept."""
    with device:
        model = copy.deepcopy(network.build()).to(device).train()
    inputs, targets = (value.to(device) for value in (network.inputs, network.targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    precision.prepare(model, optimizer)

    def passes() -> None:
        with precision.autocast():
            loss = network.loss_fn(model(inputs), targets)
        precision.backward(loss)

    def step() -> None:
        passes()
        precision.step(optimizer)
        optimizer.zero_grad()

    for _ in range(2):
        step()
    if device.type == "cpu":
        return peak_of_events(passes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def peak_of_events(run: Callable[[], None]) -> int:
    """Return the highest sum of the allocations of a CPU."""
    with torch.profiler.profile(profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def row_of(network: Network, name: str, device: torch.device) -> list[str]:
    """Return activations, prediction, measurement and their ratio; or the error, so that other rows still run."""
    try:
        predicted = predict(network, make_precision(name, device), device)
        found = measure(network, make_precision(name, device), device)
    except (MezzoError, RuntimeError, ValueError) as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", "-", "-", "-"]
    peak = predicted.peak if device.type == "cuda" else predicted.forward_backward
    shown = [f"{count / GIB:.3f} GiB" for count in (predicted.activations, peak, found)]
    return [*shown, f"{peak / found:.3f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    options = parser.parse_args()
    device = torch.device(options.device)
    began = time.perf_counter()
    torch.manual_seed(0)
    left = 0
    rows = [["network", "precision", "activations", "predicted", "measured", "predicted / measured"]]
    for network in networks(is_small=device.type == "cpu"):
        for name in options.precisions:
            rows.append([network.name, name, *row_of(network, name, device)])
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                left = max(left, torch.cuda.memory_allocated())
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(markdown_table(rows))
    print(f"torch {torch.__version__}, {where}, {time.perf_counter() - began:.0f} s")
    print(f"left between rows (workspace of cuBLAS): at most {left / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
