"""The networks of `graph_sweep.py`, built from `graph_sweep.yml`: small, without dropout, each with a batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

ROWS, CLASSES, WORDS, LENGTH = 8, 10, 96, 16
Batch = tuple[Tensor, ...]
CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("graph_sweep.yml").read_text())


class ByPosition(nn.Module):
    """A model of transformers that takes its tensors by position, and returns its loss."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        constants = {"return_loss": True} if "pixel_values" in self.names and "input_ids" in self.names else {}
        loss: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **constants).loss
        return loss


def inputs(kind: str) -> dict[str, Tensor]:
    """Return the arguments of a model of transformers, labels included."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % CLASSES
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 10:], mask[3, 5:] = 0, 0
    size = 64 if kind in ("image64", "segment") else 32
    image = torch.randn(ROWS, 3, size, size, generator=draw) + labels.view(-1, 1, 1, 1) / CLASSES
    pixel_labels = (torch.arange(size * size).view(1, size, size) % CLASSES).repeat(ROWS, 1, 1)
    return {
        "lm": {"input_ids": ids, "labels": ids},
        "padded_lm": {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        "padded": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "ids": {"input_ids": ids, "labels": labels},
        "perceiver": {"inputs": ids, "attention_mask": mask, "labels": labels},
        "image": {"pixel_values": image, "labels": labels},
        "image64": {"pixel_values": image, "labels": labels},
        "segment": {"pixel_values": image, "labels": pixel_labels},
        "speech": {"input_features": torch.randn(ROWS, 16, 64, generator=draw), "labels": ids[:, :8]},
        "wave": {"input_values": torch.randn(ROWS, 1600, generator=draw), "labels": labels},
        "clip": {"input_ids": ids, "pixel_values": image, "attention_mask": mask},
    }[kind]


def without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        for name in ("p", "drop_prob", "dropout", "attn_drop", "dropout_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model


def build(name: str) -> tuple[nn.Module, Callable[..., Tensor], Batch]:
    """Return the model, its loss, and a batch (inputs, then the target)."""
    torch.manual_seed(0)
    source, case = name.split(":", 1)
    labels = torch.arange(ROWS) % CLASSES
    if source == "timm":
        import timm

        kind, size, options = CASES["timm"][case]
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        model = without_dropout(timm.create_model(kind, pretrained=False, num_classes=CLASSES, **options))
        images = torch.randn(ROWS, 3, size, size) + labels.view(-1, 1, 1, 1) / CLASSES
        if all(param.dim() < 5 for param in model.parameters()):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, cross_entropy, (images.contiguous(memory_format=torch.channels_last), labels)
    import transformers

    auto, kind, options = CASES["hf"][case]
    config = transformers.AutoConfig.for_model(case.split("+")[0], **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # as everybody who trains
    parts = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    for each in (config, *parts):
        for key, value in list(vars(each).items()):
            if "drop" in key and isinstance(value, float):
                setattr(each, key, 0.0)
    model = without_dropout(getattr(transformers, auto).from_config(config))
    made = inputs(kind)
    return ByPosition(model, list(made)), lambda loss, target: loss, (*made.values(), labels)


def cross_entropy(out: Any, target: Tensor) -> Tensor:
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return sum((nn.functional.cross_entropy(each, target) for each in outs), torch.zeros(()))
