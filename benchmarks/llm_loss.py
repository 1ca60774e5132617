"""Loss curves of a Llama model on real text: three seeds of stock bfloat16, and mezzo's O2 and O3.

python benchmarks/llm_loss.py --json losses.json                       # an H200: about three minutes
python benchmarks/llm_loss.py --size tiny --steps 6 --length 64 --most-mb 1 --words 512    # anywhere, a trial

The text is the documentation of the Python installation that runs this: its Markdown, reStructuredText and text
files, the descriptions of packages, and the docstrings of the standard library. Its SHA-256 is printed. All runs
train at the same time, each in its own process: losses do not depend on speed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import mezzo

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))

from model import SIZES, Llama

TEXT_NAMES = ("*.md", "*.rst", "*.txt", "METADATA")
SMOOTHED = 20
"""Steps of a mean: single batches differ by more than the runs do."""
WARMUP_STEPS = 30
MAX_NORM = 1.0
O3_SHARE = 0.01
"""O3 must end within this share of O2's loss."""


@dataclass(frozen=True)
class Run:
    """One training."""

    by: str
    """stock or mezzo."""
    level: str
    seed: int

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.by} {self.level}, seed {self.seed}"


RUNS = (*(Run("stock", "autocast", seed) for seed in range(3)), Run("mezzo", "O2", 0), Run("mezzo", "O3", 0))


def documentation(most: int) -> bytes:
    """Return documentation of this Python installation, up to a number of bytes; equal files count once."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    parts: list[bytes] = []
    seen: set[bytes] = set()
    size = 0
    for text in _texts(folders):
        digest = hashlib.sha256(text).digest()
        if digest not in seen:
            seen.add(digest)
            parts.append(text)
            size += len(text)
        if size >= most:
            break
    return b"\n".join(parts)[:most]


def _texts(folders: Sequence[Path]) -> Iterator[bytes]:
    for folder in folders:
        for file in sorted({file for name in TEXT_NAMES for file in folder.rglob(name) if file.is_file()}):
            yield file.read_bytes()
    for file in sorted(folders[-1].rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates of tools
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        yield "\n".join(filter(None, found)).encode()


def tokens_of(text: bytes, words: int) -> tuple[Tensor, int]:
    """Return the text as tokens, and how many different ones there are: of a BPE of this text, or bytes."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 256
    lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet))
    ids = [number for each in tokenizer.encode_batch(lines) for number in each.ids]
    return torch.tensor(ids), words


def train(run: Run, options: argparse.Namespace, tokens_file: str, words: int) -> list[float]:
    """Return the loss of each step."""
    device = torch.device(options.device)
    tokens = torch.load(tokens_file, weights_only=True)
    torch.manual_seed(run.seed)
    model = Llama(SIZES[options.size], words, options.length).to(device)
    fused = {"fused": True} if run.by == "stock" and device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, **fused)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    # Every layer in FP8, also those that are too narrow to gain: the hardest case for the numbers.
    fp8 = {"min_width": 0, "min_size": 0, "emulate": device.type != "cuda"}
    precision = (
        mezzo.Precision(run.level, "bfloat16", fp8=fp8 if run.level == "O3" else None) if run.by == "mezzo" else None
    )
    if precision is not None:
        precision.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(run.seed)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - options.length - 1, (options.batch_size, 1), generator=generator)
        batch = tokens[starts + torch.arange(options.length + 1)].to(device)
        inputs, following = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        if precision is None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(inputs)
            loss = cross_entropy(logits.float().flatten(0, 1), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        else:
            with precision.autocast():
                loss = model(inputs, following)
            precision.backward(loss)
            precision.step(optimizer, max_norm=MAX_NORM)
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def _work(queue: Any, run: Run, options: argparse.Namespace, tokens_file: str, words: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(RUNS)))
    queue.put((run.name, train(run, options, tokens_file, words)))


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return means over the last steps, from the first full window on."""
    return [sum(losses[end - SMOOTHED : end]) / SMOOTHED for end in range(SMOOTHED, len(losses) + 1)]


def judge(curves: dict[str, list[float]]) -> list[tuple[str, bool]]:
    """Return the claims about the curves, and whether they hold."""
    means = {run: smoothed(curves[run.name]) for run in RUNS}
    stock = [means[run] for run in RUNS if run.by == "stock"]
    o2, o3 = (means[next(run for run in RUNS if run.level == level)] for level in ("O2", "O3"))
    spread = [max(values) - min(values) for values in zip(*stock, strict=True)]
    apart = [abs(mine - theirs) for mine, theirs in zip(o2, stock[0], strict=True)]
    last = abs(o3[-1] - o2[-1]) / o2[-1]
    return [
        (
            f"O2 against stock of the same seed: at most {max(apart):.4f} apart, {apart[-1]:.4f} at the end; three seeds "
            f"of stock are up to {max(spread):.4f} apart, {spread[-1]:.4f} at the end",
            max(apart) <= max(spread),
        ),
        (f"O3 ends {last:.2%} from O2 ({o3[-1]:.4f} and {o2[-1]:.4f})", last <= O3_SHARE),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.4b", choices=SIZES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--words", type=int, default=32000, help="vocabulary; without the package tokenizers: 256 bytes"
    )
    parser.add_argument("--most-mb", type=int, default=24, help="size of the text")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--device", default=device, choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="where to write the curves")
    options = parser.parse_args(arguments)
    if options.steps < SMOOTHED and options.size != "tiny":
        parser.error(f"--steps {options.steps}: must be at least {SMOOTHED}, the steps of a mean")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs, print what came out; 1 if a claim does not hold."""
    options = parse(arguments)
    begun = time.perf_counter()
    text = documentation(options.most_mb * 10**6)
    digest = hashlib.sha256(text).hexdigest()
    tokens, words = tokens_of(text, options.words)
    print(f"text: {len(text)} bytes, SHA-256 {digest}, {len(tokens)} tokens of {words}", flush=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "tokens.pt")
        torch.save(tokens, file)
        workers = [context.Process(target=_work, args=(queue, run, options, file, words)) for run in RUNS]
        for worker in workers:
            worker.start()
        curves: dict[str, list[float]] = {}
        while len(curves) < len(RUNS):
            if any(worker.exitcode not in (None, 0) for worker in workers):
                for worker in workers:
                    worker.kill()
                raise SystemExit("a training failed; its traceback is above")
            if not queue.empty():
                name, losses = queue.get()
                curves[name] = losses
                ends = losses[-SMOOTHED:]
                print(
                    f"{name}: first {losses[0]:.4f}, last {sum(ends) / len(ends):.4f} (mean of {len(ends)})", flush=True
                )
            time.sleep(0.2)
    claims = judge(curves) if options.steps >= SMOOTHED else []
    for claim, holds in claims:
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    print(
        f"{options.size}, {options.steps} steps of {options.batch_size} x {options.length}: {time.perf_counter() - begun:.0f} s"
    )
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        found = {"options": settings, "text_sha256": digest, "runs": [asdict(run) for run in RUNS], "curves": curves}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(not all(holds for _, holds in claims))


if __name__ == "__main__":
    raise SystemExit(main())
