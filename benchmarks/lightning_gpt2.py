"""GPT-2 124M under Lightning's Trainer: `precision="bf16-mixed"` against `plugins=[MezzoPrecision("O2", "bfloat16")]`.

Random weights from a transformers configuration, without dropout; batches of 16 x 1024 synthetic tokens; AdamW with
torch's fused kernels on both sides. All rows train from the same weights on the same batches. Each row is a process
of its own. The time is that of all steps after the warm-up, in the Trainer's own loop. The last column is the mean of
the last eight steps, which see each batch once. The first losses must agree to one percent: the weights are the same.

    PYTHONPATH=src python benchmarks/lightning_gpt2.py [--steps 100] [--tiny] [--rows stock,mezzo-fuse] [--json FILE]

`--tiny` shrinks model and batch, to try the script; it also runs on a CPU.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl

BATCHES = 8


@dataclass(frozen=True)
class Row:
    title: str
    by_mezzo: bool
    fuse: bool = False
    compiled: bool = False


ROWS = {
    "stock": Row('precision="bf16-mixed"', False),
    "mezzo": Row("MezzoPrecision O2", True),
    "mezzo-fuse": Row("MezzoPrecision O2, fuse=True", True, fuse=True),
    "stock-compiled": Row('precision="bf16-mixed", torch.compile', False, compiled=True),
    "mezzo-compiled": Row("MezzoPrecision O2, torch.compile", True, compiled=True),
    "mezzo-fuse-compiled": Row("MezzoPrecision O2, fuse=True, torch.compile", True, fuse=True, compiled=True),
}


class Clock(pl.Callback):
    """Times the steps after the warm-up; the device is waited for at both ends only."""

    def __init__(self, warm: int) -> None:
        self.warm, self.seconds, self.steps, self.started = warm, 0.0, 0, 0.0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.warm:
            synchronise()
            self.started = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        synchronise()
        self.seconds, self.steps = time.perf_counter() - self.started, trainer.global_step - self.warm


class Gpt2(pl.LightningModule):
    def __init__(self, tiny: bool, compiled: bool) -> None:
        super().__init__()
        import transformers as hf

        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2} if tiny else {}
        config = hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes)
        model: nn.Module = hf.GPT2LMHeadModel(config)
        self.model = torch.compile(model) if compiled else model
        self.losses: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_batches(rows: int, length: int) -> list[dict[str, Tensor]]:
    """Return sequences that repeat a pattern of 16 tokens: learnable within some steps."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(512, (rows, 16), generator=generator).repeat(1, length // 16) for _ in range(BATCHES)]
    return [{"input_ids": each, "labels": each} for each in ids]


def measure(row: Row, steps: int, tiny: bool) -> dict[str, float | int | str]:
    """Train one row in this process."""
    on_gpu = torch.cuda.is_available()
    warm = min(20, steps // 2)
    rows, length = (2, 64) if tiny else (16, 1024)
    torch.manual_seed(0)
    model, clock = Gpt2(tiny, row.compiled), Clock(warm)
    fused = 0
    if row.by_mezzo:
        from mezzo.integrations.lightning import MezzoPrecision

        plugin = MezzoPrecision("O2", "bfloat16", fuse=row.fuse)
        options = {"plugins": [plugin]}
    else:
        options = {"precision": "bf16-mixed"}
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu", devices=1, max_steps=steps, max_epochs=-1, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(make_batches(rows, length), batch_size=None))
    if row.by_mezzo:
        fused = len(plugin.mezzo.fused)
    return {
        "row": row.title,
        "tokens_per_s": clock.steps * rows * length / clock.seconds,
        "ms_per_step": 1000 * clock.seconds / clock.steps,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "first_loss": float(model.losses[0]),
        "loss": float(torch.stack(model.losses[-BATCHES:]).mean()),
        "steps": steps,
        "fused_parts": fused,
    }


def measure_in_process(name: str, steps: int, tiny: bool) -> dict[str, float | int | str] | None:
    """Train one row in a process of its own; None if it failed, with the reason on stderr."""
    command = [sys.executable, __file__, "--row", name, "--steps", str(steps), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{ROWS[name].title}: failed\n{done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return None
    result = json.loads(done.stdout.splitlines()[-1])
    numbers = f"{result['tokens_per_s']:,.0f} tokens/s, {result['peak_gib']:.2f} GiB, loss {result['loss']:.4f}"
    print(f"{ROWS[name].title}: {numbers}", file=sys.stderr, flush=True)
    return result


def table(results: dict[str, dict]) -> str:
    """Return the table; each row is compared with the stock row of the same form."""
    lines = [
        "| recipe | tokens/s | ms/step | of stock | peak GiB | of stock | first loss | loss after {} steps |",
        "|---" * 8 + "|",
    ]
    lines[0] = lines[0].format(next(iter(results.values()))["steps"])
    for name, result in results.items():
        stock = results.get("stock-compiled" if ROWS[name].compiled else "stock", result)
        speed = f"{result['tokens_per_s'] / stock['tokens_per_s']:.2f}x"
        memory = f"{result['peak_gib'] / stock['peak_gib']:.0%}" if stock["peak_gib"] else "-"
        lines.append(
            f"| {result['row']} | {result['tokens_per_s']:,.0f} | {result['ms_per_step']:.1f} | {speed} "
            f"| {result['peak_gib']:.2f} | {memory} | {result['first_loss']:.4f} | {result['loss']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps per row, warm-up included")
    parser.add_argument("--tiny", action="store_true", help="a small model and batch, to try the script")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        warnings.simplefilter("ignore")  # Lightning's advice about data loaders
        print(json.dumps(measure(ROWS[options.row], options.steps, options.tiny)))
        return
    names = options.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"--rows {', '.join(sorted(unknown))}: must be some of {', '.join(ROWS)}")
    results = {name: measure_in_process(name, options.steps, options.tiny) for name in names}
    results = {name: result for name, result in results.items() if result is not None}
    if options.json:
        options.json.write_text(json.dumps(list(results.values()), indent=1) + "\n", encoding="utf-8")
    if not results:
        sys.exit("no row could be measured")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, Lightning {pl.__version__}\n\n{table(results)}")
    firsts = [result["first_loss"] for result in results.values()]
    if max(firsts) > 1.01 * min(firsts):
        sys.exit(f"the first losses differ, from {min(firsts):.4f} to {max(firsts):.4f}: a row computes something else")
    sys.exit(1 if len(results) < len(names) else 0)


if __name__ == "__main__":
    main()
