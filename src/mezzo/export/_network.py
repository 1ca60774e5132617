"""The exported form of a network: one input, one output, a chosen last operator, one precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mezzo.amp import float32_copy
from mezzo.dtypes import PRECISION_DTYPES
from mezzo.export import OutputOp

DTYPES: dict[str, torch.dtype] = {word: getattr(torch, name) for word, name in PRECISION_DTYPES.items()}


class Deployable(nn.Module):
    """A network in evaluation: float32 images in; labels (int32), probabilities or logits (float32) out.

    Args:
        network: Gives logits, or a list with the logits first. It is copied, not changed.
        output_op: What stands at the end.
        precision: fp32, fp16 or bf16: in which everything between is computed.
    """

    def __init__(self, network: nn.Module, output_op: OutputOp, precision: str = "fp32") -> None:
        super().__init__()
        self._dtype = DTYPES[precision]
        self.network = with_plain_pools(float32_copy(network)).to(self._dtype).eval()
        self.output_op = output_op

    def forward(self, images: Tensor) -> Tensor:
        """Return the output for images (n, 3, h, w)."""
        return finish(self.logits(images), self.output_op)

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits in float32."""
        outputs = self.network(images.to(self._dtype))
        logits: Tensor = outputs[0] if isinstance(outputs, list | tuple) else outputs
        return logits.float()


def finish(logits: Tensor, output_op: OutputOp) -> Tensor:
    """Return the output of an operation on logits (n, classes, ...)."""
    if output_op == "argmax":
        return logits.argmax(dim=1).to(torch.int32)
    return logits.softmax(dim=1) if output_op == "softmax" else logits


class PlainAdaptivePool(nn.Module):
    """Adaptive average pooling as two matrix products.

    ONNX has no adaptive pooling. For a free input size, torch's exporter writes a graph that is
    right only for the sample's size. Each output is a mean over a range of rows and columns; the
    limits are arithmetic on the size.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self._height, self._width = height, width

    def forward(self, x: Tensor) -> Tensor:
        """Return x (n, c, h, w) as (n, c, height, width)."""
        rows = _means(x.shape[2], self._height, x)
        columns = _means(x.shape[3], self._width, x)
        return rows @ x @ columns.t()


def _means(size: int, parts: int, like: Tensor) -> Tensor:
    """Return the matrix (parts, size) whose rows average `parts` ranges with the limits of torch's pooling."""
    place = torch.arange(size, device=like.device).unsqueeze(0)
    part = torch.arange(parts, device=like.device).unsqueeze(1)
    begin = part * size // parts
    end = ((part + 1) * size + parts - 1) // parts
    inside = (place >= begin) & (place < end)
    return (inside.to(torch.float32) / (end - begin).to(torch.float32)).to(like.dtype)


def with_plain_pools(network: nn.Module) -> nn.Module:
    """Replace adaptive average pooling to more than one pixel, in place."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.AdaptiveAvgPool2d):
                size = child.output_size
                height, width = size if isinstance(size, tuple) else (size, size)
                if height is not None and width is not None and (height, width) != (1, 1):
                    setattr(parent, name, PlainAdaptivePool(height, width))
    return network
