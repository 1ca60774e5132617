"""Models of other libraries, trained for 50 steps: the distance of each recipe's loss from float32, time and memory.

The recipes are float32 (TF32 off), stock `torch.autocast` (with torch's GradScaler in float16), and mezzo at O1 and O2; the
last also under the rule of lists version 1 (`use_promote=False`). All start from the same weights and see the same batches.
The distance of a recipe is the mean over the seeds of |loss - float32's loss|, at the last step and over all steps.

    PYTHONPATH=src python benchmarks/other_models.py [--models llama,gpt2] [--seeds 3] [--steps 50] [--speed] [--nine]

`--speed` times larger models, recipes in turns. `--nine` does it for mezzo's own nine networks.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mezzo import amp
from mezzo.dtypes import dtype_name

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    lr: float = 1e-3


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Return a maker of sequences that a model learns within a few steps: words of unequal frequency, with repeats."""

    def make(generator: torch.Generator) -> Batch:
        words = (torch.rand(batch, length, generator=generator) ** 4 * vocabulary).long()
        repeats = torch.rand(batch, length, generator=generator) < 0.5
        ids = words.clone()
        for place in range(1, length):
            ids[:, place] = torch.where(repeats[:, place], ids[:, place - 1], words[:, place])
        return (ids,)

    return make


def _images(batch: int, size: int, classes: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        label = torch.randint(classes, (batch,), generator=generator)
        image = torch.randn(batch, 3, size, size, generator=generator)
        return image + label.view(-1, 1, 1, 1) / classes - 0.5, label

    return make


def _language(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _transformers(kind: str, large: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers as hf

        width, layers, heads, vocabulary = (1024, 12, 16, 32000) if large else (256, 4, 8, 1024)
        if kind == "llama":
            config = hf.LlamaConfig(
                vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64,
                num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=2048,
            )  # fmt: skip
            return hf.LlamaForCausalLM(config)
        if kind == "gpt2":
            config = hf.GPT2Config(
                vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=2048,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            return hf.GPT2LMHeadModel(config)
        config = hf.T5Config(  # T5-small's own sizes
            vocab_size=vocabulary, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config)

    return build


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return build


def cases(large: bool) -> dict[str, Case]:
    """Return the models by name; `large` selects sizes for measuring speed."""
    vocabulary, batch, length = (32000, 8, 1024) if large else (1024, 8, 512)
    words = _tokens(vocabulary, batch, length)
    images = _images(64, 224, 10) if large else _images(16, 224, 10)
    rotary, plain = ("eva02_base_patch16_clip_224", "vit_base_patch16_224") if large else (
        "eva02_tiny_patch14_224", "vit_tiny_patch16_224",
    )  # fmt: skip
    return {
        "llama": Case(_transformers("llama", large), words, _language),
        "gpt2": Case(_transformers("gpt2", large), words, _language),
        "t5_small": Case(_transformers("t5", large), words, _language),
        "rotary_vit": Case(_timm(rotary), images, _classify, 3e-4),
        "vit": Case(_timm(plain), images, _classify, 3e-4),
    }


def nine_cases() -> dict[str, Case]:
    """Return mezzo's own networks."""
    from mezzo.vision.models import create_model, list_models

    def segment(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        return sum(nn.functional.cross_entropy(output, batch[1]) for output in outputs)

    def masks(generator: torch.Generator) -> Batch:
        image = torch.randn(8, 3, 512, 512, generator=generator)
        return image, torch.randint(2, (8, 512, 512), generator=generator)

    found = {}
    for name in list_models():
        is_classifier = name.startswith("mobilenet")
        found[name] = Case(
            (lambda name=name, classes=10 if is_classifier else 2: create_model(name, num_classes=classes)),
            _images(128, 224, 10) if is_classifier else masks,
            _classify if is_classifier else segment,
        )
    return found


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    by: str
    dtype: torch.dtype = torch.float32
    level: str = ""
    use_promote: bool = True

    @property
    def name(self) -> str:
        """The name in tables."""
        half = dtype_name(self.dtype)
        rule = "" if self.use_promote else ", use_promote=False"
        return " ".join(part for part in (self.by, half, self.level) if part) + rule


def recipes() -> list[Recipe]:
    """Return every recipe; float32 first."""
    found = [Recipe("stock")]
    for dtype in (torch.float16, torch.bfloat16):
        found += [Recipe("stock", dtype), Recipe("mezzo", dtype, "O1"), Recipe("mezzo", dtype, "O2")]
        found.append(Recipe("mezzo", dtype, "O2", use_promote=False))
    return found


class Training:
    """One model under one recipe, a step at a time."""

    def __init__(self, case: Case, recipe: Recipe, seed: int, device: str, steps: int) -> None:
        torch.manual_seed(seed)
        self.case, self.recipe, self.device = case, recipe, device
        self.model = case.build().to(device).train()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=case.lr)
        generator = torch.Generator().manual_seed(seed)
        self.batches = [tuple(t.to(device) for t in case.batch(generator)) for _ in range(min(steps, 8))]
        half = recipe.dtype is torch.float16
        if recipe.by == "mezzo":
            amp.decorate(self.model, self.optimizer, level=recipe.level, dtype=recipe.dtype)
            self.scaler: Any = amp.GradScaler(enable=half)
        else:
            self.scaler = torch.amp.GradScaler(device, enabled=half, init_scale=2.0**15)
        self.count = 0

    def region(self) -> Any:
        """Return the region of a forward pass."""
        recipe = self.recipe
        if recipe.by == "mezzo":
            return amp.auto_cast(level=recipe.level, dtype=recipe.dtype, use_promote=recipe.use_promote)
        half = torch.bfloat16 if recipe.dtype is torch.float32 else recipe.dtype
        return torch.autocast(self.device, dtype=half, enabled=recipe.dtype is not torch.float32)

    def step(self) -> Tensor:
        """Train one step and return its loss."""
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        with self.region():
            loss = self.case.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


def distances(case: Case, seeds: int, steps: int, device: str) -> Iterator[tuple[Recipe, float, float, float]]:
    """Yield, per recipe, the mean last loss and its mean distance from float32, at the last step and over all steps."""
    reference: dict[int, Tensor] = {}
    for recipe in recipes():
        curves = []
        for seed in range(seeds):
            training = Training(case, recipe, seed, device, steps)
            curves.append(torch.stack([training.step() for _ in range(steps)]).double().cpu())
            reference.setdefault(seed, curves[-1])
            del training
            release()
        away = [(curve - reference[seed]).abs() for seed, curve in enumerate(curves)]
        last = statistics.mean(float(curve[-1]) for curve in curves)
        yield recipe, last, statistics.mean(float(a[-1]) for a in away), statistics.mean(float(a.mean()) for a in away)


def release() -> None:
    """Free the memory of the last model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def speeds(case: Case, device: str, steps: int) -> Iterator[tuple[Recipe, float, float, int, int]]:
    """Yield, per recipe in float16, the median ms of a step in two rounds in turns, peak GiB, and leaks with their MiB."""
    chosen = [recipe for recipe in recipes() if recipe.dtype is torch.float16]
    times: dict[Recipe, list[float]] = {recipe: [] for recipe in chosen}
    memory: dict[Recipe, float] = {}
    for number in range(2):
        for recipe in chosen if number % 2 == 0 else reversed(chosen):
            training = Training(case, recipe, 0, device, 2)
            for _ in range(3):
                training.step()
            for _ in range(steps):
                torch.cuda.synchronize()
                start = time.perf_counter()
                training.step()
                torch.cuda.synchronize()
                times[recipe].append(time.perf_counter() - start)
            memory[recipe] = torch.cuda.max_memory_allocated() / 2**30
            del training
            release()
    for recipe in chosen:
        leaks = []
        if recipe.by == "mezzo":
            training = Training(case, recipe, 0, device, 2)
            with amp.debugging.collect_operator_stats(print_table=False, leaks=True) as stats:
                training.step()
            leaks = stats.leaks
            del training
            release()
        extra = sum(leak.extra_bytes for leak in leaks) // 2**20
        yield recipe, statistics.median(times[recipe]) * 1e3, memory[recipe], len(leaks), extra


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--nine", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    known = nine_cases() if given.nine else cases(given.speed)
    rows = []
    for name in given.models.split(",") if given.models else known:
        if given.speed:
            for recipe, ms, gib, leaks, mib in speeds(known[name], device, 12):
                rows.append(
                    {"model": name, "recipe": recipe.name, "ms": ms, "gib": gib, "leaks": leaks, "leak_mib": mib}
                )
                print(
                    f"{name:24} {recipe.name:34} {ms:9.2f} ms {gib:7.2f} GiB {leaks:4d} leaks {mib:6d} MiB", flush=True
                )
            continue
        stock: dict[torch.dtype, tuple[float, float]] = {}
        for recipe, last, at_end, over_all in distances(known[name], given.seeds, given.steps, device):
            stock.setdefault(recipe.dtype, (at_end, over_all))
            times = [
                f"{mine / max(theirs, 1e-12):.2f}"
                for mine, theirs in zip((at_end, over_all), stock[recipe.dtype], strict=True)
            ]
            row = {"model": name, "recipe": recipe.name, "loss": last, "distance": at_end, "mean_distance": over_all}
            rows.append(row | {"x_stock": float(times[0]), "mean_x_stock": float(times[1])})
            print(
                f"{name:11} {recipe.name:34} loss {last:.5f}  distance {at_end:.5f} ({times[0]} x stock)  "
                f"over all steps {over_all:.5f} ({times[1]} x stock)", flush=True,
            )  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
