"""A Llama model in a hundred lines: RMS norm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from mezzo.kernels import linear_cross_entropy


@dataclass(frozen=True)
class Size:
    """The widths of a model."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    is_tied: bool = False
    """Whether embedding and head are one matrix."""


# 1b, 3b and 8b are those of Llama 3.1 and 3.2 as published.
SIZES = {
    "tiny": Size(64, 192, 2, 4, 2),
    "0.4b": Size(1024, 2816, 24, 16, 16),
    "1b": Size(2048, 8192, 16, 32, 8, is_tied=True),
    "3b": Size(3072, 8192, 28, 24, 8, is_tied=True),
    "8b": Size(4096, 14336, 32, 32, 8),
}
ROTARY_BASE = 500000.0
EPSILON = 1e-5


class Attention(nn.Module):
    """Causal attention; several query heads share one head of keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key, self.value = (nn.Linear(size.width, size.key_heads * self.head_width, bias=False) for _ in range(2))
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return what each position takes from those before it, for [batch, length, width]."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual around it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(size.width, eps=EPSILON) for _ in range(2))
        self.attention = Attention(size)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the block's output for [batch, length, width]."""
        x = x + self.attention(self.attention_norm(x), rotation)
        y = self.mlp_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Predicts the next token.

    Args:
        size: The widths.
        words: Number of different tokens.
        length: The longest row of tokens.
    """

    def __init__(self, size: Size, words: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width, eps=EPSILON), nn.Linear(size.width, words, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        if size.is_tied:
            self.head.weight = self.embedding.weight
        cosine, sine = rotations(length, size.width // size.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, tokens: Tensor, following: Tensor | None = None) -> Tensor:
        """Return logits [batch, length, words] for tokens [batch, length]; with the next tokens their mean loss."""
        x = self.embedding(tokens)
        rotation = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        # In chunks of rows: all logits at once would take more memory than a small model.
        return self.head(x) if following is None else linear_cross_entropy(x, self.head.weight, following)


def rotations(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, in float32: half positions would be wrong from 256 on."""
    rates = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of a head by its position's angle; the dtype of x stays."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)
