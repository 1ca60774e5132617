"""Train a model of another library at O2: a small GPT-2 of transformers learns a text by heart.

python examples/hf_text.py --steps 40
"""

import argparse
import codecs
import contextlib
import io
import sys

import torch
from torch import nn

import mezzo
from mezzo import amp


def read_options() -> argparse.Namespace:
    """Return sizes and steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="characters per sample")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--cpu-compute", default="auto", choices=["auto", "native", "float32"], help="how a CPU computes in half"
    )
    return parser.parse_args()


def read_text(length: int, device: str) -> torch.Tensor:
    """Return the text of Python's module `this`, as rows of bytes."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing `this` prints the text
        import this
    text = torch.tensor(list(codecs.decode(this.s, "rot13").encode()), device=device)
    return text[: len(text) // length * length].view(-1, length)


def make_model(options: argparse.Namespace) -> nn.Module:
    """Return a GPT-2 over bytes with random weights; exit with 2 if transformers is not installed."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        print("transformers is not installed; pip install transformers", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    sizes = {"n_positions": options.length, "n_embd": options.size, "n_layer": options.layers, "n_head": 4}
    config = GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes)
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(options.device)


def main() -> None:
    """Train, and show in which dtype the matrix products ran."""
    options = read_options()
    model, text = make_model(options), read_text(options.length, options.device)

    # The whole training in mixed precision: nine lines.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    precision = mezzo.Precision(policy=amp.Policy.create("O2", options.dtype, cpu_compute=options.cpu_compute))
    model, optimizer = precision.prepare(model, optimizer)
    for step in range(options.steps):
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(text).logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  {loss.dtype}")

    with torch.no_grad(), precision.autocast(), precision.record() as stats:
        model(text)
    for line in stats.table().splitlines():
        if line.startswith(("<--------------- Op Name", "  addmm", "  mm ")):
            print(line)


if __name__ == "__main__":
    main()
