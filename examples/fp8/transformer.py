"""Train a decoder-only transformer on the bytes of Python's standard library, with or without FP8 products.

python examples/fp8/transformer.py               # tiny, on any machine, in a few seconds
python examples/fp8/transformer.py --size 100m   # 100 M parameters: a GPU of compute capability 8.9 or above

A device without FP8 units emulates them: the same numbers, no speed-up.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mezzo import amp, static
from mezzo.fp8 import why_no_fp8

NUM_BYTES = 256
HEAD_WIDTH = 64
WARMUP_STEPS = 50
MAX_NORM = 1.0
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "layers": 2, "context": 64, "batch_size": 8, "steps": 30, "lr": 6e-3},
    "100m": {"width": 1024, "layers": 8, "context": 512, "batch_size": 32, "steps": 500, "lr": 6e-4},
}
"""Defaults of the options, by size."""


class Block(nn.Module):
    """Pre-norm block: causal attention and an MLP, each with a layer norm before it and a residual around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for [batch, context, width]."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, width of a head]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Predicts the next byte; about 12 * layers * width**2 parameters."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits [batch, context, 256] for bytes [batch, context]."""
        x = self.bytes(text) + self.positions
        return self.head(self.norm(self.blocks(x)))


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the next bytes."""
    return cross_entropy(logits.flatten(0, 1), following.flatten())


def read_text(device: str) -> Tensor:
    """Return the standard library's modules and packages, in the order of their names, as bytes on the device."""
    root = Path(os.__file__).parent
    left_out = {"site-packages", "dist-packages", "test"}
    files = sorted(file for file in (*root.glob("*.py"), *root.glob("*/*.py")) if file.parent.name not in left_out)
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).to(device)


def batches(text: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield passages from random positions, and the same passages shifted by one byte."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
        places = (starts + torch.arange(context)).to(text.device, non_blocking=True)
        yield text[places].long(), text[places + 1].long()


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> Callable[..., Tensor]:
    """Decorate model and optimizer; return a function that trains one step on a batch and returns the loss."""
    if options.level == "fp32":
        policy = amp.Policy.create("O0")
    elif options.level == "O3":
        # Emulation saves no time, so small layers are FP8 as well.
        small: dict[str, Any] = {"min_width": 0, "min_size": 0} if options.emulate else {}
        recipe = amp.Fp8Recipe(
            scaling=options.scaling, granularity=options.granularity, emulate=options.emulate, **small
        )
        amp.decorate(model, optimizer, level="O3", dtype=options.dtype, fp8=recipe)
        policy = amp.Policy.create("O3", options.dtype, fp8=recipe)
    else:
        amp.decorate(model, optimizer, level=options.level, dtype=options.dtype)
        policy = amp.Policy.create(options.level, options.dtype)
    scaler = amp.GradScaler(enable=options.level != "fp32" and options.dtype == "float16")
    if options.graph == "compile":
        return static.compile_step(model, loss_of, optimizer, scaler=scaler, policy=policy, max_norm=MAX_NORM)
    if options.graph == "capture":
        sample = torch.zeros(options.batch_size, options.context, dtype=torch.long, device=options.device)
        return static.capture_step(
            model, loss_of, optimizer, (sample, sample), scaler=scaler, policy=policy, max_norm=MAX_NORM
        )

    def step(text: Tensor, following: Tensor) -> Tensor:
        with amp.auto_cast(policy=policy):
            loss = loss_of(model(text), following)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_model(options: argparse.Namespace) -> tuple[Transformer, torch.optim.Optimizer]:
    """Return the network, initialised from the seed, and its optimizer."""
    torch.manual_seed(options.seed)
    model = Transformer(options.width, options.layers, options.context).to(options.device)
    return model, torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)


def set_rate(optimizer: torch.optim.Optimizer, options: argparse.Namespace, number: int) -> None:
    """Set the learning rate of a step: it rises linearly over the first WARMUP_STEPS."""
    for group in optimizer.param_groups:
        group["lr"] = options.lr * min(1.0, (number + 1) / WARMUP_STEPS)


def train(options: argparse.Namespace, say: Callable[[str], object] = print) -> dict[str, Any]:
    """Train and print progress; return all losses, the median tokens per second, and the number of parameters."""
    model, optimizer = make_model(options)
    step = make_step(model, optimizer, options)
    data = batches(read_text(options.device), options.batch_size, options.context, options.seed)
    every = max(1, options.steps // 10)
    losses: list[Tensor] = []
    rates: list[float] = []
    begun = time.perf_counter()
    for number in range(options.steps):
        set_rate(optimizer, options, number)
        losses.append(step(*next(data)))
        if (number + 1) % every == 0:
            loss, now = losses[-1].item(), time.perf_counter()  # the only place that waits for the device
            rates.append(every * options.batch_size * options.context / (now - begun))
            say(f"step {number + 1:5d}  loss {loss:.4f}  {rates[-1]:,.0f} tokens/s")
            begun = time.perf_counter()
    return {
        "losses": torch.stack(losses).tolist(),
        "tokens_per_s": statistics.median(rates[1:] or rates),  # the first rate includes set-up
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; those that are left out are those of the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=SIZES, help="defaults of the sizes below")
    parser.add_argument("--level", default="O3", choices=["fp32", "O1", "O2", "O3"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--emulate", action="store_true", help="emulate FP8 although the device has units for it")
    parser.add_argument("--scaling", default="current", choices=["current", "delayed"])
    parser.add_argument("--granularity", default="tensor", choices=["tensor", "row"])
    parser.add_argument("--graph", default="none", choices=["none", "capture", "compile"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, help="passages per step")
    parser.add_argument("--context", type=int, help="bytes per passage")
    parser.add_argument("--width", type=int, help="a multiple of 64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lr", type=float, help="learning rate after the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of passages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write losses and speed")
    options = parser.parse_args(arguments)
    for name, value in SIZES[options.size].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.emulate |= options.level == "O3" and why_no_fp8(torch.device(options.device)) is not None
    return options


def main() -> None:
    """Train, print a summary, write the JSON file."""
    options = parse()
    result = train(options)
    last = result["losses"][-20:]
    how = " (FP8 emulated)" if options.emulate else ""
    print(
        f"{options.level} {options.dtype}{how}: loss {sum(last) / len(last):.4f} over the last {len(last)} of {options.steps} "
        f"steps, {result['tokens_per_s']:,.0f} tokens/s, {result['parameters'] / 1e6:.1f} M parameters"
    )
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": settings, **result}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
