"""Train a small GPT-2 with the Hugging Face Trainer in mixed precision, and let it write.

python examples/integrations/hf_trainer.py
"""

import argparse
import codecs
import contextlib
import io
import sys
import tempfile

import torch

import mezzo


def read_options() -> argparse.Namespace:
    """Return level, dtype and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-fuse", action="store_true", help="leave GELU and loss of transformers as they are")
    return parser.parse_args()


def read_text(length: int) -> list[dict[str, torch.Tensor]]:
    """Return the text of Python's module `this`, as overlapping rows of bytes."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing `this` prints the text
        import this
    text = torch.tensor(list(codecs.decode(this.s, "rot13").encode()))
    return [{"input_ids": row, "labels": row} for row in text.unfold(0, length, length // 4)]


def main() -> None:
    """Train, and complete a line of the text."""
    options = read_options()
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

        from mezzo.integrations.transformers import MezzoTrainer
    except ImportError:
        print("transformers is not installed; pip install 'mezzo[transformers]'", file=sys.stderr)
        sys.exit(2)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    learns_by_heart = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **learns_by_heart, bos_token_id=None, eos_token_id=None))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=16, learning_rate=3e-3,
            logging_steps=max(1, options.steps // 5), save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = MezzoTrainer(
            model,
            arguments,
            train_dataset=read_text(64),
            precision=mezzo.Precision(options.level, options.dtype),
            fuse=not options.no_fuse,
        )
        trainer.train()
    for part in trainer.precision.fused:
        print(part)
    start = torch.tensor([list(b"The Zen of")], device=trainer.args.device)
    written = trainer.model.generate(start, max_new_tokens=24, do_sample=False, pad_token_id=0)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
