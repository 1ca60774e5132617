"""What a network costs: parameters and multiply-accumulates, counted without computing anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mezzo.vision.models._create import create_model
from mezzo.vision.models._registry import model_info


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of a network as it ran."""

    path: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    macs: int


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_macs(model: nn.Module, height: int, width: int) -> int:
    """Return the multiply-accumulates of convolutions and matrix products for one image, in evaluation."""
    with torch.device("meta"):
        image = torch.empty(1, 3, height, width)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.to("meta").eval()(image)
    return int(counter.get_total_flops()) // 2


def describe(name: str) -> dict[str, Any]:
    """Return what `mezzo models` shows of a network."""
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
    info = model_info(name)
    with torch.device("meta"):
        model = create_model(name).eval()
        image = torch.empty(1, 3, *info.input_size)
    rows: list[LayerRow] = []
    paths = {part: path for path, part in model.named_modules()}

    def note(part: nn.Module, inputs: Any, output: Any) -> None:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ()
        own = sum(p.numel() for p in part.parameters(recurse=False))
        rows.append(LayerRow(paths[part], type(part).__name__, shape, own, _macs_of(part, output)))

    leaves = [part for part in model.modules() if not list(part.children())]
    handles = [part.register_forward_hook(note) for part in leaves]
    try:
        with torch.no_grad():
            model(image)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _macs_of(part: nn.Module, output: Any) -> int:
    if isinstance(part, nn.Conv2d):
        weight = part.weight
        return int(output.numel() * weight[0].numel())
    if isinstance(part, nn.Linear):
        return int(output.numel() * part.in_features)
    return 0
