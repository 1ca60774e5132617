"""Compares a network with the numbers of the reference run (a float64 run of the original)."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo_rule
from torch import Tensor, nn

from mezzo.vision.models import create_model

ZOO = Path(__file__).with_name("zoo")


class Reference:
    """The stored numbers of one network."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.json: dict[str, Any] = json.loads((ZOO / f"{name}.json").read_text())
        self.numbers = dict(np.load(ZOO / f"{name}.npz"))
        self.shapes = {key: tuple(shape) for key, shape in self.json["keys"]}
        self.classes: int = self.json["num_classes"]
        self.is_classifier = self.classes == 1000


@functools.cache
def reference(name: str) -> Reference:
    return Reference(name)


def torch_key(key: str) -> str:
    return key.replace("._mean", ".running_mean").replace("._variance", ".running_var")


def paddle_layout(array: np.ndarray) -> np.ndarray:
    return array.T if array.ndim == 2 else array


def load_rule(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Load the rule's weights; every key must be there, and none more (torch's batch counters aside)."""
    values = {torch_key(k): torch.tensor(paddle_layout(v)) for k, v in zoo_rule.state(shapes).items()}
    own = {k for k in model.state_dict() if not k.endswith("num_batches_tracked")}
    assert own == set(values), (sorted(own - set(values))[:5], sorted(set(values) - own)[:5])
    model.load_state_dict(values, strict=False)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the network with the rule's weights and without dropout."""
    model = create_model(name)
    load_rule(model, reference(name).shapes)
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return model.to(dtype)


def images(tag: str, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = {"eval": (2, 3, 128, 160), "odd": (1, 3, 97, 131), "train": (4, 3, 96, 128)}[tag]
    return torch.tensor(zoo_rule.image(tag, shape)).to(dtype)


def train_labels(ref: Reference) -> Tensor:
    if ref.is_classifier:
        return torch.tensor(zoo_rule.class_labels("train", 4, ref.classes))
    return torch.tensor(zoo_rule.label_map("train", 4, 96, 128, ref.classes))


def outputs_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out] if isinstance(out, Tensor) else list(out)


def stored(ref: Reference, logits: Tensor) -> np.ndarray:
    """Logits as they are stored: every fourth pixel."""
    array = logits.detach().double().numpy()
    return array if ref.is_classifier else array[..., ::4, ::4]


def error_over_std(ref: Reference, key: str, logits: Tensor) -> float:
    """Return the largest difference from the stored logits, over the standard deviation of the whole."""
    assert list(logits.shape) == ref.json["full"][key]["shape"]
    return float(np.abs(stored(ref, logits) - ref.numbers[key]).max() / ref.json["full"][key]["std"])
