"""GELU in a captured graph: an operator of mezzo's, where one product is all that reads the result."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph
from torch.nn import functional as F

from mezzo.kernels import fused_gelu
from mezzo.static._rows import as_rows, feeds_one_product, takes_rows


def fuse_activations(graph: Graph) -> int:
    """Let each GELU in Dynamo's graph that only one product reads call mezzo's operator.

    Returns:
        How many were found. `activate` decides with the dtypes of the traced graph.
    """
    found = [node for node in graph.nodes if node.target is F.gelu and feeds_one_product(node)]
    for node in found:
        node.target = activate
    return len(found)


def activate(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU."""
    if takes_rows(input, ("gelu",)):
        return fused_gelu(as_rows(input), approximate).view(input.shape)
    return F.gelu(input, approximate=approximate)


ACTIVATION_CALLS = (activate,)
"""What this pass puts into a graph."""
