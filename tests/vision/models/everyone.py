"""All nine networks with the rule's weights, also the three whose outputs are kept back."""

import json

import torch
from reference import ZOO, Reference, images, load_rule, outputs_of, reference
from torch import Tensor, nn

from mezzo.vision.models import create_model

MODELS = json.loads((ZOO / "models.json").read_text())
QUICK = ["mobilenet_v3_small", "pp_humanseg_lite", "pp_humanseg_mobile", "pp_liteseg_stdc1"]


def with_rule(name: str) -> nn.Module:
    """Return the network in float32, without dropout."""
    file = ZOO / f"keys_{name}.json"
    stored = json.loads(file.read_text()) if file.exists() else reference(name).json
    keys = stored["keys"] if isinstance(stored, dict) else stored
    model = create_model(name)
    load_rule(model, {key: tuple(shape) for key, shape in keys})
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    return model


def train_logits(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return outputs_of(model.train(), images("train", torch.float32))


__all__ = ["MODELS", "QUICK", "Reference", "train_logits", "with_rule"]
