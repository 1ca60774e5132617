"""Train a Llama model on text, at any level, on one device or sharded over several.

python examples/llama/train.py                                     # tiny, on any machine, in a few seconds
python examples/llama/train.py --size 1b --level O3 --graph        # one large GPU
torchrun --nproc_per_node=8 examples/llama/train.py --size 8b --recompute   # several GPUs: FSDP2
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mezzo
from mezzo.fp8 import why_no_fp8
from model import SIZES, Block, Llama

WARMUP_STEPS = 20
MAX_NORM = 1.0


def read_tokens(paths: Sequence[Path], tokenizer: Path | None) -> tuple[Tensor, int, str]:
    """Return all text as tokens, the number of different tokens, and the text's SHA-256.

    Without a tokenizer file (of the library tokenizers, such as tokenizer.json) a token is a byte.
    """
    files = sorted(file for path in paths for file in ([path] if path.is_file() else path.glob("**/*")))
    text = b"\n".join(file.read_bytes() for file in files if file.suffix in (".py", ".txt", ".md", ".rst"))
    if not text:
        raise SystemExit(f"--text {' '.join(map(str, paths))}: found no .txt, .md, .rst or .py file")
    digest = hashlib.sha256(text).hexdigest()
    if tokenizer is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 256, digest
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(tokenizer))
    return torch.tensor(reader.encode(text.decode("utf-8", errors="replace")).ids), reader.get_vocab_size(), digest


def batches(tokens: Tensor, rows: int, length: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield passages from random places, and the same passages one token further."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
        places = starts + torch.arange(length)
        yield tokens[places].to(device, non_blocking=True), tokens[places + 1].to(device, non_blocking=True)


def as_it_is(loss: Tensor) -> Tensor:
    """Return the loss that the model computed."""
    return loss


def make_precision(options: argparse.Namespace) -> mezzo.Precision:
    """Return the precision of the options."""
    small: dict[str, Any] = {"emulate": True, "min_width": 0, "min_size": 0} if options.emulate else {}
    return mezzo.Precision(
        options.level,
        options.dtype,
        fp8=small if options.level == "O3" else None,
        master_weight="compact" if options.compact else None,
        optimizer_state=options.optimizer_state,
    )


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, print progress, and return losses and speed."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if options.device == "cuda" else None)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    tokens, words, digest = read_tokens(options.text, options.tokenizer)

    torch.manual_seed(options.seed)  # the same first weights in all processes
    model = Llama(SIZES[options.size], words, options.length).to(device)
    if options.recompute:
        mezzo.amp.checkpoint_blocks(model, Block)
    precision = make_precision(options)
    if ranks > 1:
        precision.shard(model, blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    precision.prepare(model, optimizer)
    captured = None
    if options.graph:
        captured = precision.compile(model, as_it_is, optimizer, max_norm=MAX_NORM, num_inputs=2)

    data = batches(tokens, options.batch_size, options.length, options.seed + 1000 * rank, device)
    losses: list[Tensor] = []
    begun = time.perf_counter()
    for number in range(options.steps):
        inputs, following = next(data)
        if captured is not None:
            loss = captured(inputs, following)
        else:
            with precision.autocast():
                loss = model(inputs, following)
            precision.backward(loss)
            precision.step(optimizer, max_norm=MAX_NORM)
            optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach().clone())
        if rank == 0 and (number + 1) % max(1, options.steps // 10) == 0:
            print(f"step {number + 1:5d}  loss {losses[-1].item():.4f}")  # the only place that waits for the device
    whole = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(whole)
        whole /= ranks
    spent = time.perf_counter() - begun
    return {
        "losses": whole.tolist(),
        "tokens_per_s": options.steps * options.batch_size * options.length * ranks / spent,
        "text_sha256": digest,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "is_first": rank == 0,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[Path(os.__file__).parent / "email"], help="files, folders"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; without it a token is a byte")
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--emulate", action="store_true", help="emulate FP8 although the device has units")
    parser.add_argument("--compact", action="store_true", help="masters keep only the bits that the half weights lack")
    parser.add_argument(
        "--optimizer-state", default="float32", choices=["float32", "bfloat16"], help="dtype of AdamW's moments"
    )
    parser.add_argument("--graph", action="store_true", help="capture or compile the whole step, whichever is faster")
    parser.add_argument("--recompute", action="store_true", help="compute each block again in the backward pass")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of each process")
    parser.add_argument("--length", type=int, help="tokens of a row; 64 for tiny, 2048 for the other sizes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="where to write losses and speed")
    options = parser.parse_args(arguments)
    if options.length is None:
        options.length = 64 if options.size == "tiny" else 2048
    if options.level == "O3" and why_no_fp8(torch.device(options.device)) is not None:
        options.emulate = True
    if options.graph and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--graph with several processes: sharded weights are not captured; leave it out")
    return options


def main() -> None:
    """Train, print a summary, write the JSON file."""
    options = parse()
    result = train(options)
    if result.pop("is_first"):
        print(
            f"{options.size} {options.level} {options.dtype}: loss {result['losses'][-1]:.4f}, "
            f"{result['tokens_per_s']:,.0f} tokens/s, {result['parameters'] / 1e6:.1f} M parameters"
        )
        if options.json is not None:
            settings = {name: str(value) for name, value in vars(options).items()}
            options.json.write_text(json.dumps({"options": settings, **result}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)  # gloo's threads end their work
