"""Models of other libraries trained in eager mode: stock autocast, mezzo O2, and mezzo O2 with fused parts.

All sides train in bfloat16 from the same weights on the same batches, without dropout. The stock side is
`torch.autocast` with torch's fused AdamW and the library's own attention (SDPA). A step is forward, loss, backward
and update; gradients become None; the loss is not read in timed steps.

    PYTHONPATH=src python benchmarks/eager_models.py [--models gpt2,bert,llama,vit] [--small]

`--small` shrinks everything, to try the script; it also runs on a CPU.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mezzo import Precision

WARM, STEPS, TRAINED = 8, 20, 50
BATCHES = 4
SIDES = ("stock autocast", "mezzo O2", "mezzo O2 fuse=True")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, a batch of it, and its loss."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def tokens(vocabulary: int, rows: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Return a maker of sequences that repeat a pattern of 16 tokens: learnable within some steps."""

    def make(generator: torch.Generator) -> Batch:
        pattern = torch.randint(min(vocabulary, 512), (rows, 16), generator=generator)
        ids = pattern.repeat(1, -(-length // 16))[:, :length].contiguous()
        return {"input_ids": ids, "labels": ids}

    return make


def images(rows: int, size: int, classes: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        label = torch.randint(classes, (rows,), generator=generator)
        image = torch.randn(rows, 3, size, size, generator=generator)
        return {"image": image + label.view(-1, 1, 1, 1) / classes - 0.5, "label": label}

    return make


def language(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def make_cases(small: bool) -> dict[str, Case]:
    """Return the models by name."""

    def gpt2() -> nn.Module:
        import transformers as hf

        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2} if small else {}
        config = hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes)
        return hf.GPT2LMHeadModel(config)

    def bert() -> nn.Module:
        import transformers as hf

        shrunk = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        sizes = shrunk if small else {}
        return hf.BertForMaskedLM(hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))

    def llama() -> nn.Module:
        import transformers as hf

        width, layers, heads = (64, 2, 2) if small else (1024, 24, 16)
        config = hf.LlamaConfig(
            vocab_size=32000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=2048, use_cache=False,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)

    def vit() -> nn.Module:
        import timm

        return timm.create_model("vit_tiny_patch16_224" if small else "vit_base_patch16_224", num_classes=1000)

    rows = (lambda full: 2) if small else (lambda full: full)
    length = (lambda full: 64) if small else (lambda full: full)
    return {
        "gpt2": Case("GPT-2 124M, 16 x 1024", gpt2, tokens(50257, rows(16), length(1024)), language),
        "bert": Case("BERT-base, 32 x 512", bert, tokens(30522, rows(32), length(512)), language),
        "llama": Case("Llama 0.4B, 8 x 2048", llama, tokens(32000, rows(8), length(2048)), language),
        "vit": Case("ViT-B/16, 128 x 224 x 224", vit, images(rows(128), 224, 1000), classify),
    }


def make_step(case: Case, side: str, device: str) -> Callable[[int], Tensor]:
    """Return a function that trains one step and returns its loss, on the device."""
    torch.manual_seed(0)
    model = case.build().to(device).train()
    generator = torch.Generator().manual_seed(1)
    batches = [{k: v.to(device) for k, v in case.batch(generator).items()} for _ in range(BATCHES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if side == SIDES[0]:

        def stock(number: int) -> Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = case.loss(model, batches[number % BATCHES])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return stock
    precision = Precision("O2", "bfloat16")
    precision.prepare(model, optimizer, fuse=side == SIDES[2])
    if precision.fused:
        print(f"<!-- {case.title}: {len(precision.fused)} parts fused, first: {precision.fused[0]} -->", flush=True)

    def ours(number: int) -> Tensor:
        with precision.autocast():
            loss = case.loss(model, batches[number % BATCHES])
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return ours


def measure(case: Case, side: str, device: str, steps: int) -> tuple[float, float, float]:
    """Return milliseconds per step, peak GiB, and the loss after `TRAINED` steps."""
    gc.collect()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    step = make_step(case, side, device)
    for number in range(WARM):
        step(number)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(WARM, WARM + steps):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(number)
            end.record()
            times.append((begin, end))
        else:
            start = time.perf_counter()
            step(number)
            times.append((time.perf_counter() - start) * 1e3)
    if on_gpu:
        torch.cuda.synchronize()
    spent = statistics.median(b.elapsed_time(e) for b, e in times) if on_gpu else statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    for number in range(WARM + steps, TRAINED - 1):
        step(number)
    return spent, peak, float(step(TRAINED - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,bert,llama,vit")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = make_cases(options.small)
    print("| model | side | ms/step | of stock | speed-up | peak GiB | of stock | loss after 50 steps |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models.split(","):
        if name not in cases:
            raise SystemExit(f"--models: unknown model {name!r}; choose from {', '.join(cases)}")
        first: tuple[float, float] | None = None
        for side in SIDES:
            spent, peak, loss = measure(cases[name], side, device, STEPS)
            first = first or (spent, peak)
            memory = f"{peak:.2f} | {peak / first[1]:.0%}" if first[1] else "- | -"
            times = f"{spent:.1f} | {spent / first[0]:.0%} | {first[0] / spent:.2f}x"
            print(f"| {cases[name].title} | {side} | {times} | {memory} | {loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
