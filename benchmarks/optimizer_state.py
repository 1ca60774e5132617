"""Training with bfloat16 optimizer state beside float32 state: the losses of a small Llama on text.

python benchmarks/optimizer_state.py --steps 600 --seeds 3

Three kinds of state for AdamW, from the same first weights on the same batches:

* float32;
* bfloat16 with stochastic rounding, `Precision(optimizer_state="bfloat16")`;
* bfloat16 rounded to nearest, as a contrast: float32 state, rounded after each step.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import mezzo

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from train import batches, loss_of, read_tokens

from model import SIZES, Llama

KINDS = ("float32", "bfloat16 stochastic", "bfloat16 nearest")
LAST = 50
"""The loss of a run is the mean of so many last steps."""


def round_to_nearest(optimizer: torch.optim.Optimizer) -> None:
    """Round the float32 moments of AdamW to bfloat16 numbers."""
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(state[key].bfloat16())


def train(kind: str, seed: int, options: argparse.Namespace) -> float:
    """Return the mean loss of the last steps."""
    tokens, words, _ = read_tokens([Path(os.__file__).parent / "email"], None)
    torch.manual_seed(seed)
    model = Llama(SIZES["tiny"], words, 64)
    state = "bfloat16" if kind == "bfloat16 stochastic" else None
    precision = mezzo.Precision(options.level, "bfloat16", optimizer_state=state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, options.beta2), weight_decay=0.1)
    precision.prepare(model, optimizer)
    data = batches(tokens, 8, 64, seed, torch.device("cpu"))
    losses = []
    for _ in range(options.steps):
        inputs, following = next(data)
        _, loss = precision.train_step(lambda: (None, loss_of(model(inputs), following)), optimizer, max_norm=1.0)  # noqa: B023
        if kind == "bfloat16 nearest":
            round_to_nearest(optimizer)
        losses.append(loss.item())
    return statistics.fmean(losses[-LAST:])


def main() -> None:
    """Print one row per kind of state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--level", default="O2")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options}")
    for kind in KINDS:
        began = time.perf_counter()
        losses = [train(kind, seed, options) for seed in range(options.seeds)]
        shown = " ".join(f"{loss:.4f}" for loss in losses)
        print(
            f"{kind:20s} {shown}  mean {statistics.fmean(losses):.4f}  {time.perf_counter() - began:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
