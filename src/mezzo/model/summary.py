"""The layers of a network: output shapes, parameters and multiply-accumulates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.report import text_table


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of a network."""

    path: str
    kind: str
    output: tuple[int, ...]
    """Shape of its last output; empty if it did not run or returned no tensor."""
    parameters: int
    """Only its own, without those of the modules inside it."""
    macs: int = 0
    """Multiply-accumulates of convolutions and linear layers."""


def parameter_counts(network: nn.Module) -> dict[str, int]:
    """Return the number of parameters, and of those that are trained.

    >>> parameter_counts(nn.Linear(3, 2))
    {'total_params': 8, 'trainable_params': 8}
    """
    sizes = [(param.numel(), param.requires_grad) for param in network.parameters()]
    return {
        "total_params": sum(size for size, _ in sizes),
        "trainable_params": sum(size for size, is_trained in sizes if is_trained),
    }


@torch.no_grad()
def layer_rows(network: nn.Module, inputs: Sequence[Tensor] | None) -> list[LayerRow]:
    """Return the layers that have parameters or no modules inside them, in the order in which they run.

    Args:
        network: Called once with `inputs`, in evaluation mode.
        inputs: None: the rows have no shapes, and are in the order of definition.
    """
    rows: dict[nn.Module, LayerRow] = {}
    for path, layer in network.named_modules():
        own = sum(param.numel() for param in layer.parameters(recurse=False))
        if own or not any(layer.children()):
            rows[layer] = LayerRow(path, type(layer).__name__, (), own)

    run: dict[nn.Module, LayerRow] = {}

    def note(layer: nn.Module, _args: Any, output: Any) -> None:
        row = run.get(layer, rows[layer])
        if isinstance(output, Tensor):
            row = replace(row, output=tuple(output.shape), macs=row.macs + _macs_of(layer, output))
        run[layer] = row

    if inputs is not None:
        handles = [layer.register_forward_hook(note) for layer in rows]
        try:
            with in_evaluation(network):
                network(*inputs)
        finally:
            for handle in handles:
                handle.remove()
    return list({**run, **{layer: row for layer, row in rows.items() if layer not in run}}.values())


def _macs_of(layer: nn.Module, output: Tensor) -> int:
    if isinstance(layer, nn.Conv2d):
        return output.numel() * layer.weight[0].numel()
    if isinstance(layer, nn.Linear):
        return output.numel() * layer.in_features
    return 0


def layer_table(network: nn.Module, inputs: Sequence[Tensor] | None) -> str:
    """Return the rows of `layer_rows` as a text table, with the parameter counts below it."""
    table = [("layer", "kind", "output", "parameters")]
    for row in layer_rows(network, inputs):
        shape = str(list(row.output)) if row.output else "-"
        table.append((row.path or "(network)", row.kind, shape, f"{row.parameters:,}"))
    lines = text_table(table, right={3})
    rule = "-" * len(lines[0])
    counts = parameter_counts(network)
    total = f"total {counts['total_params']:,}, trained {counts['trainable_params']:,}"
    return "\n".join([lines[0], rule, *lines[1:], rule, total])


@contextmanager
def in_evaluation(network: nn.Module) -> Iterator[None]:
    """Put the network into evaluation mode; afterwards restore the mode of each module."""
    modes = [(layer, layer.training) for layer in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for layer, is_training in modes:
            layer.training = is_training
