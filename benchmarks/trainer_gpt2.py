"""GPT-2 124M under the Hugging Face Trainer: `bf16=True` against mezzo O2, eager and compiled.

All recipes train in bfloat16 from the same random weights on the same tokens, without dropout, with the Trainer's
default optimizer (torch's fused AdamW) and its default clipping (max_grad_norm=1). Each recipe runs in a process of
its own. The first fifth of the steps, compilation included, is not timed.

    PYTHONPATH=src python benchmarks/trainer_gpt2.py [--steps 100] [--recipes stock,o2,o2-fuse,...] [--tiny]

A progress line goes to stderr as each recipe ends, the table to stdout. `--tiny` shrinks model and batch, to try the
script on a CPU.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mezzo import Precision
from mezzo.integrations.transformers import MezzoTrainer

RECIPES = {
    "stock": "Trainer bf16=True, eager",
    "o2": "mezzo O2, eager",
    "o2-fuse": "mezzo O2 fuse=True, eager",
    "stock-compile": "Trainer bf16=True, compiled",
    "o2-compile": "mezzo O2, compiled",
    "o2-fuse-compile": "mezzo O2 fuse=True, compiled",
}
LOGGED = 10  # steps per logged loss


class Tokens(torch.utils.data.Dataset):
    """Sequences that repeat a pattern of 16 tokens, the same for every recipe: learnable within some steps."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pattern = torch.randint(min(vocabulary, 4096), (count, 16), generator=generator)
        self._ids = pattern.repeat(1, -(-length // 16))[:, :length].contiguous()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Clock(TrainerCallback):
    """Measures the time from the end of the warm-up to the last step."""

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self.begin = self.end = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._warm:
            self.begin = now()
        elif state.global_step == state.max_steps:
            self.end = now()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(recipe: str, steps: int, is_tiny: bool) -> dict[str, float]:
    """Return tokens per second, the peak memory in GiB, and the mean loss of the last steps."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows, length = (2, 32) if is_tiny else (16, 1024)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 257} if is_tiny else {}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(
        n_positions=length, bos_token_id=None, eos_token_id=None, use_cache=False, **no_dropout, **sizes
    )
    torch.manual_seed(0)
    model, clock = GPT2LMHeadModel(config), Clock(max(1, steps // 5))
    is_stock = recipe.startswith("stock")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            learning_rate=3e-4,
            warmup_steps=10,
            bf16=is_stock,
            torch_compile=recipe.endswith("compile"),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=min(LOGGED, steps),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        parts = {"train_dataset": Tokens(rows * steps, length, config.vocab_size), "callbacks": [clock]}
        if is_stock:
            trainer = Trainer(model, args, **parts)
        else:
            trainer = MezzoTrainer(model, args, precision=Precision("O2", "bfloat16"), fuse="fuse" in recipe, **parts)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = rows * length * (steps - max(1, steps // 5))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"tokens_s": tokens / (clock.end - clock.begin), "peak": peak, "loss": losses[-1]}


def run_alone(recipe: str, steps: int, is_tiny: bool) -> dict[str, float] | None:
    """Return what `measure` returns in a process of its own; None, after its last lines, if it failed."""
    command = [sys.executable, __file__, "--only", recipe, "--steps", str(steps), *(["--tiny"] if is_tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{recipe}: failed\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", help="measure one recipe in this process, and print JSON")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: must be at least 2; the first steps are not timed")
    if options.only:
        print(json.dumps(measure(options.only, options.steps, options.tiny)))
        return
    chosen = options.recipes.split(",")
    for name in chosen:
        if name not in RECIPES:
            parser.error(f"--recipes: unknown recipe {name!r}; choose from {', '.join(RECIPES)}")
    found: dict[str, dict[str, float]] = {}
    for name in chosen:
        start = time.perf_counter()
        row = run_alone(name, options.steps, options.tiny)
        if row is not None:
            found[name] = row
            spent = time.perf_counter() - start
            numbers = f"{row['tokens_s']:,.0f} tokens/s, {row['peak']:.2f} GiB, loss {row['loss']:.4f}"
            print(f"{RECIPES[name]}: {numbers} ({spent:.0f} s)", file=sys.stderr, flush=True)
    print_table(found, options.steps)
    sys.exit(0 if len(found) == len(chosen) else 1)


def print_table(found: dict[str, dict[str, float]], steps: int) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, {steps} steps; speed-up over `bf16=True` of the same kind\n")
    print(f"| recipe | tokens/s | speed-up | peak GiB | of stock | loss, steps {max(1, steps - LOGGED + 1)}-{steps} |")
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        base = found.get("stock-compile" if name.endswith("compile") else "stock")
        speed = f"{row['tokens_s'] / base['tokens_s']:.2f}x" if base else "-"
        share = f"{row['peak'] / base['peak']:.0%}" if base and base["peak"] else "-"
        numbers = f"{row['tokens_s']:,.0f} | {speed} | {row['peak']:.2f} | {share} | {row['loss']:.4f}"
        print(f"| {RECIPES[name]} | {numbers} |")


if __name__ == "__main__":
    main()
