"""Fold batch norms into the convolutions before them: a third fewer launches, the same result."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONV_TARGETS = frozenset(
    {"conv1d.default", "conv2d.default", "conv2d.padding", "conv3d.default", "convolution.default"}
)


def fold_batch_norms(network: nn.Module, program: ExportedProgram) -> nn.Module:
    """Return a copy of a network in eval mode with its batch norms folded into convolutions.

    Args:
        network: The traced network; it is not changed.
        program: Program of the network; its graph shows which norm follows which convolution.
    """
    folded = copy.deepcopy(network)
    for conv_name, norm_name in _pairs(program):
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        # Subclasses may do more in their forward.
        if type(conv) in _CONVOLUTIONS and type(norm) in _NORMS:
            _fold(conv, norm)  # type: ignore[arg-type]
            folded.set_submodule(norm_name, nn.Identity())
    return folded


def _pairs(program: ExportedProgram) -> list[tuple[str, str]]:
    """Return pairs of a convolution and the norm that is the only user of its result; both are used once."""
    owner = _owners(program)
    found = []
    for node in program.graph.nodes:
        conv = node.args[0] if _target(node) == "batch_norm.default" else None
        if not isinstance(conv, Node) or _target(conv) not in _CONV_TARGETS or len(conv.users) > 1:
            continue
        weight: Any = conv.args[1]
        mean: Any = node.args[3]
        if weight in owner and mean in owner and len(weight.users) == len(mean.users) == 1:
            found.append((owner[weight], owner[mean]))
    return found


def _owners(program: ExportedProgram) -> dict[Any, str]:
    """Return the module whose parameter or buffer each input of the graph is."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {
        node: names[node.name].rpartition(".")[0]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    }


def _target(node: Node) -> str:
    return str(node.target).removeprefix("aten.") if node.op == "call_function" else ""


def _fold(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
    """Fold a norm into a convolution; the arithmetic is float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = norm.bias.double() if norm.bias is not None else torch.zeros_like(scale)
    bias = conv.bias.double() if conv.bias is not None else torch.zeros_like(scale)
    with torch.no_grad():
        weight = conv.weight.double() * scale.view(-1, *[1] * (conv.weight.dim() - 1))
        shifted = shift + (bias - norm.running_mean.double()) * scale
        conv.weight = nn.Parameter(weight.to(conv.weight.dtype))
        conv.bias = nn.Parameter(shifted.to(conv.weight.dtype))
