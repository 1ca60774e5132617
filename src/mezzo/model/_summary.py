"""The layers of a network as a table: what comes out of each, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def count_parameters(network: nn.Module) -> dict[str, int]:
    """Return how many numbers are in the parameters, and how many of them are trained.

    >>> count_parameters(nn.Linear(3, 2))
    {'total_params': 8, 'trainable_params': 8}
    """
    sizes = [(param.numel(), param.requires_grad) for param in network.parameters()]
    return {
        "total_params": sum(size for size, _ in sizes),
        "trainable_params": sum(size for size, is_trained in sizes if is_trained),
    }


def summarize(network: nn.Module, inputs: Sequence[Tensor] | None) -> str:
    """Return a table of the layers that compute by themselves.

    Args:
        network: Run once, in evaluation, if there are inputs.
        inputs: None: the table has no shapes.
    """
    shapes = {} if inputs is None else _shapes_of(network, inputs)
    rows = [("layer", "kind", "output", "parameters")]
    for name, part in network.named_modules():
        own = sum(param.numel() for param in part.parameters(recurse=False))
        if own or not any(part.children()):
            rows.append((name or "(network)", type(part).__name__, shapes.get(name, "-"), f"{own:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
        + "  "
        + row[3].rjust(widths[3])
        for row in rows
    ]
    rule = "-" * len(lines[0])
    counts = count_parameters(network)
    total = f"total {counts['total_params']:,}, trained {counts['trainable_params']:,}"
    return "\n".join([lines[0], rule, *lines[1:], rule, total])


@torch.no_grad()
def _shapes_of(network: nn.Module, inputs: Sequence[Tensor]) -> dict[str, str]:
    shapes: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(_part: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                shapes[name] = str(list(output.shape))

        return hook

    handles = [part.register_forward_hook(note(name)) for name, part in network.named_modules()]
    try:
        with in_evaluation(network):
            network(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


@contextmanager
def in_evaluation(network: nn.Module) -> Iterator[None]:
    """Inside, the network is in evaluation; afterwards each part is in the mode it was in."""
    modes = [(part, part.training) for part in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training
