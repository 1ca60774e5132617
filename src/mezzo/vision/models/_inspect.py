"""The cost of a network, counted on the meta device: nothing is computed or allocated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mezzo.model.summary import LayerRow, layer_rows, parameter_counts
from mezzo.vision.models._create import create_model
from mezzo.vision.models._registry import model_info


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained parameters."""
    return parameter_counts(model)["trainable_params"]


def count_macs(model: nn.Module, height: int, width: int) -> int:
    """Return the multiply-accumulates of convolutions and matrix products for one image, in evaluation."""
    with torch.device("meta"):
        image = torch.empty(1, 3, height, width)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.to("meta").eval()(image)
    return int(counter.get_total_flops()) // 2


def describe(name: str) -> dict[str, Any]:
    """Return the entries of `mezzo models` for a network."""
    info = model_info(name)
    with torch.device("meta"):
        model = create_model(name)
    return {
        "name": info.name,
        "task": info.task,
        "parameters": count_parameters(model),
        "macs": count_macs(model, *info.input_size),
        "input_size": list(info.input_size),
        "num_classes": info.num_classes,
        "heads": info.train_outputs,
        "aliases": list(info.aliases),
    }


def summarize(name: str) -> list[LayerRow]:
    """Return the layers of a network in the order in which they run, for one image of its usual size."""
    with torch.device("meta"):
        model = create_model(name)
        image = torch.empty(1, 3, *model_info(name).input_size)
    return layer_rows(model, [image])
