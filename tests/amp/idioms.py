"""Idioms of real models: norms, attention, positions, losses, samplers, routing, as model code writes them.

`IDIOMS[name]` holds a function of named tensors and a maker of its inputs. An input is one of three kinds:
`activations` arrive in half where a half layer comes before; `weights` are half after `decorate` at O2; all others
(coordinates, masks, targets, time steps, labels) are handed over in float32 or as integers, as user code does.
The functions name no device: inputs come on the right one, and tensors made inside follow `torch.device(...)`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Idiom:
    name: str
    family: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Callable[[], Tensors]
    """Return the inputs in float32 and integers; the judge seeds the generator before."""
    activations: frozenset[str]
    weights: frozenset[str]
    has_gradients: bool
    """Whether gradients of activations and weights are compared, too."""


IDIOMS: dict[str, Idiom] = {}

_family = ""


def _begin(family: str) -> None:
    """Name the family of the idioms that follow."""
    global _family
    _family = family


def idiom(
    make: Callable[[], Tensors], *, activations: str = "x", weights: str = "", gradients: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table, with the maker of its inputs and the names of those of each kind."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        assert name not in IDIOMS, f"two idioms are called {name}"
        IDIOMS[name] = Idiom(
            name=name,
            family=_family,
            function=function,
            make=make,
            activations=frozenset(activations.split()),
            weights=frozenset(weights.split()),
            has_gradients=gradients,
        )
        return function

    return enter


def _normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return torch.randn(*shape) * scale + shift


def _uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(*shape) * (high - low) + low


_begin("norms")


@idiom(lambda: {"x": _normal(4, 16, 64, scale=300), "weight": _normal(64, scale=0.1, shift=1)}, weights="weight")
def rms_norm_of_t5(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return weight * x


@idiom(lambda: {"x": _normal(4, 16, 64, scale=300), "weight": _normal(64, scale=0.1, shift=1)}, weights="weight")
def rms_norm_of_llama(x: Tensor, weight: Tensor) -> Tensor:
    input_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(input_dtype)


@idiom(lambda: {"x": _normal(4, 16, 64, scale=300), "weight": _normal(64, scale=0.1)}, weights="weight")
def rms_norm_of_gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + weight.float())).type_as(x)


@idiom(lambda: {"x": _normal(4, 16, 64, scale=3)})
def rms_norm_without_cast(x: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6)


@idiom(lambda: {"x": _normal(4, 16, 64, scale=300)})
def rms_norm_by_powers_without_cast(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@idiom(lambda: {"x": _normal(8, 256, scale=1, shift=20)})
def one_pass_variance_in_float32(x: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide * wide).mean(-1, keepdim=True) - mean * mean
    return (wide - mean) / torch.sqrt(variance + 1e-5)


@idiom(lambda: {"x": _normal(8, 3, 3, 3, scale=0.1, shift=0.02)}, activations="", weights="x")
def weight_standardisation(x: Tensor) -> Tensor:
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    variance = x.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5) ** 0.5


@idiom(
    lambda: {"x": _normal(2, 8, 10, 10), "weight": _normal(4, 8, 3, 3, scale=0.05), "gain": torch.ones(4, 1, 1, 1)},
    weights="weight gain",
)
def scaled_standardised_convolution(x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    fan_in = weight[0].numel()
    flat = F.batch_norm(
        weight.reshape(1, 4, -1), None, None, weight=(gain * fan_in**-0.5).view(-1), training=True, eps=1e-6
    )
    return F.conv2d(x, flat.reshape_as(weight), padding=1)


@idiom(lambda: {"x": _normal(16, 128, scale=20)})
def normalise_to_length_one(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@idiom(lambda: {"x": _normal(16, 128, scale=40)})
def normalise_by_hand(x: Tensor) -> Tensor:
    return x / x.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-12)


@idiom(lambda: {"x": _normal(16, 128, scale=30)})
def normalise_by_hand_in_float32(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-12)


@idiom(lambda: {"x": _normal(2, 16, 8, 8, scale=5, shift=3), "weight": torch.ones(16)}, weights="weight")
def group_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    grouped = x.reshape(2, 4, -1)
    mean = grouped.mean(-1, keepdim=True)
    variance = grouped.var(-1, keepdim=True, unbiased=False)
    normed = (grouped - mean) / torch.sqrt(variance + 1e-5)
    return normed.reshape_as(x) * weight[:, None, None]


@idiom(
    lambda: {"x": _normal(2, 16, 8, 8, scale=5, shift=1), "weight": torch.ones(16), "bias": torch.zeros(16)},
    weights="weight bias",
)
def layer_norm_2d_of_convnext(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-6)
    return weight[:, None, None] * x + bias[:, None, None]


@idiom(
    lambda: {"x": _normal(2, 6, 6, 16, scale=200), "gamma": _normal(16, scale=0.1), "beta": torch.zeros(16)},
    weights="gamma beta",
)
def global_response_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    spread = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
    ratio = spread / (spread.mean(dim=-1, keepdim=True) + 1e-6)
    return gamma * (x * ratio) + beta + x


@idiom(lambda: {"x": _normal(4, 8, 32), "shift": _normal(4, 32), "scale": _normal(4, 32)}, activations="x shift scale")
def adaptive_layer_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (32,)) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@idiom(lambda: {"x": _normal(2, 8, 12, 12, scale=30)})
def batch_statistics_over_pixels(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=(0, 2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


_begin("attention")


def _qkv(scale: float = 1.0) -> Tensors:
    return {n: _normal(2, 4, 12, 16, scale=scale) for n in ("q", "k", "v")}


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@idiom(lambda: {**_qkv(), "keep": (torch.rand(2, 1, 1, 12) > 0.3).float()}, activations="q k v")
def attention_with_mask_of_minus_1e9(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(16)
    scores = scores + (1.0 - keep) * -1e9
    return F.softmax(scores, dim=-1) @ v


@idiom(lambda: {**_qkv(), "keep": (torch.rand(2, 1, 1, 12) > 0.3).float()}, activations="q k v")
def attention_with_mask_of_minus_10000(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / 16**0.5
    return torch.matmul(torch.softmax(scores + (1.0 - keep) * -10000.0, dim=-1), v)


@idiom(lambda: {**_qkv(), "keep": _causal(12)}, activations="q k v")
def attention_with_mask_of_minus_infinity(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 16**-0.5
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


@idiom(lambda: {**_qkv(), "keep": _causal(12)}, activations="q k v")
def attention_with_smallest_number_as_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / 4.0
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(keep, scores, lowest)
    return torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)


@idiom(lambda: {**_qkv(), "keep": _causal(12)}, activations="q k v")
def attention_with_lowest_of_the_query_added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    extended = (1.0 - keep.to(q.dtype)) * torch.finfo(q.dtype).min
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + extended
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


@idiom(lambda: {**_qkv(), "keep": _causal(12)}, activations="q k v")
def attention_of_neox_by_baddbmm(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    empty = torch.zeros(8, 12, 12, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=1.0, alpha=0.25)
    scores = scores.masked_fill(~keep, -1e4)
    return torch.bmm(torch.softmax(scores, -1).to(v.dtype), v)


@idiom(lambda: _qkv(), activations="q k v")
def attention_with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(4)])
    distance = torch.arange(12)[None, :] - torch.arange(12)[:, None]
    bias = slopes[:, None, None] * distance[None].abs().neg().float()
    scores = q @ k.transpose(-1, -2) / 4 + bias
    return torch.softmax(scores, dim=-1) @ v


@idiom(lambda: {**_qkv(0.5), "table": _normal(32, 4)}, activations="q k v", weights="table")
def attention_with_relative_bias_of_t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    distance = (torch.arange(12)[:, None] - torch.arange(12)[None, :]).abs()
    far = 8 + (torch.log(distance.float() / 8 + 1e-6) / math.log(128 / 8) * 8).to(torch.long)
    bucket = torch.where(distance < 8, distance, far.clamp(max=31)).clamp(min=0)
    bias = F.embedding(bucket, table).permute(2, 0, 1)[None]
    scores = torch.matmul(q, k.transpose(3, 2)) + bias
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


@idiom(lambda: {**_qkv(), "table": _normal(23, 4)}, activations="q k v", weights="table")
def attention_with_window_bias_added_in_place(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    scores = q * 0.25 @ k.transpose(-2, -1)
    index = torch.arange(12)[:, None] - torch.arange(12)[None, :] + 11
    scores += table[index.view(-1)].view(12, 12, 4).permute(2, 0, 1).unsqueeze(0)
    return scores.softmax(dim=-1) @ v


@idiom(lambda: {**_qkv(3), "keep": _causal(12)}, activations="q k v")
def attention_with_soft_capped_logits(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * 0.25
    scores = 50.0 * torch.tanh(scores / 50.0)
    scores = scores.masked_fill(~keep, -2.3819763e38 if scores.dtype is not torch.float16 else -65504.0)
    return F.softmax(scores, dim=-1).to(v.dtype) @ v


@idiom(lambda: {**_qkv(), "log_scale": torch.full((4, 1, 1), math.log(10.0))}, activations="q k v", weights="log_scale")
def cosine_attention_of_swin_v2(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor) -> Tensor:
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.clamp(log_scale, max=math.log(100.0)).exp()
    return F.softmax(scores, dim=-1) @ v


@idiom(lambda: _qkv(), activations="q k v")
def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@idiom(lambda: {**_qkv(), "bias": _normal(1, 4, 12, 12, scale=3)}, activations="q k v")
def fused_attention_with_float32_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@idiom(lambda: {**_qkv(), "keep": _causal(12)}, activations="q k v")
def attention_by_einsum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 16**-0.5
    scores = scores.masked_fill(~keep, -torch.finfo(scores.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)


@idiom(lambda: _qkv(), activations="q k v")
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    normal = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=2)) + 1e-6)
    return torch.einsum("bhnd,bhde,bhn->bhne", q, context, normal)


@idiom(lambda: {"x": _normal(2, 12, 32), "weight": _normal(96, 32, scale=0.2)}, weights="weight")
def packed_projection_and_attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = F.linear(x, weight).reshape(2, 12, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * 8**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


_begin("positions")


def _inverse_frequencies(size: int = 64, base: float = 10000.0) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, size, 2).float() / size))


@idiom(lambda: {"x": torch.arange(4096)}, activations="", gradients=False)
def sinusoidal_positions(x: Tensor) -> Tensor:
    angle = x.float()[:, None] * torch.exp(torch.arange(0, 32, 2).float() * (-math.log(10000.0) / 32))
    return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)


@idiom(lambda: {"x": torch.arange(4096)}, activations="", gradients=False)
def rotary_angles_by_outer_product(x: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.outer(x.float(), _inverse_frequencies())
    return angle.cos(), angle.sin()


@idiom(lambda: {"x": torch.arange(4096)}, activations="", gradients=False)
def rotary_angles_by_einsum(x: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.einsum("i,j->ij", x.float(), _inverse_frequencies())
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


@idiom(lambda: {"x": torch.arange(2048)[None]}, activations="", gradients=False)
def rotary_angles_by_matrix_product(x: Tensor) -> tuple[Tensor, Tensor]:
    # transformers turns autocast off here, as its authors know that the product would be half otherwise.
    with torch.autocast(device_type=x.device.type, enabled=False):
        frequencies = _inverse_frequencies()[None, :, None].expand(1, -1, 1)
        angle = (frequencies @ x[:, None, :].float()).transpose(1, 2)
        return angle.cos(), angle.sin()


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@idiom(lambda: {"q": _normal(1, 2, 512, 32), "k": _normal(1, 2, 512, 32)}, activations="q k")
def rotary_applied_to_queries_and_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(512).float()[:, None] * _inverse_frequencies(32)[None, :]
    both = torch.cat((angle, angle), dim=-1)
    cos, sin = both.cos().to(q.dtype), both.sin().to(q.dtype)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


@idiom(lambda: {"x": _normal(1, 2, 512, 32)})
def rotary_applied_to_a_part_of_the_channels(x: Tensor) -> Tensor:
    turned, kept = x[..., :16], x[..., 16:]
    angle = torch.arange(512, dtype=torch.float32)[:, None] * _inverse_frequencies(16)
    angle = torch.repeat_interleave(angle, 2, dim=-1)
    even, odd = turned[..., ::2], turned[..., 1::2]
    rotated = torch.stack((-odd, even), dim=-1).flatten(-2)
    return torch.cat((turned * angle.cos() + rotated * angle.sin(), kept), dim=-1)


@idiom(lambda: {"x": _normal(1, 256, 2, 16)})
def rotary_by_complex_numbers(x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(256).float(), _inverse_frequencies(16))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
    pairs = torch.view_as_complex(x.float().reshape(1, 256, 2, 8, 2))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


@idiom(lambda: {"x": _normal(1, 2, 256, 64)})
def rotary_grid_of_timm(x: Tensor) -> Tensor:
    bands = 1.0 / (10000.0 ** (torch.arange(0, 16, 1, dtype=torch.float32) / 16))
    axes = [torch.arange(16, dtype=torch.float32) for _ in range(2)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    position = grid.unsqueeze(-1) * bands
    sin = position.sin().reshape(256, -1).repeat_interleave(2, -1)
    cos = position.cos().reshape(256, -1).repeat_interleave(2, -1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * cos + turned * sin


@idiom(lambda: {"x": torch.arange(64)}, activations="", gradients=False)
def pixel_frequency_grid_of_timm(x: Tensor) -> Tensor:
    bands = torch.linspace(1.0, 224 / 2, 16, dtype=torch.float32) * math.pi
    line = torch.linspace(-1.0, 1.0, steps=64, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1)[..., None]
    angle = grid * bands
    return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)


@idiom(lambda: {"t": torch.tensor([1, 17, 250, 999])}, activations="", gradients=False)
def timestep_embedding_of_diffusers(t: Tensor) -> Tensor:
    exponent = -math.log(10000) * torch.arange(0, 64, dtype=torch.float32) / 64
    angle = t[:, None].float() * torch.exp(exponent)[None, :]
    emb = torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)
    return torch.cat([emb[:, 64:], emb[:, :64]], dim=-1)


@idiom(
    lambda: {"t": torch.tensor([1.0, 17.0, 250.0, 999.0]), "weight": _normal(32, 64, scale=0.2)},
    activations="",
    weights="weight",
)
def timestep_embedding_and_its_layer(t: Tensor, weight: Tensor) -> Tensor:
    angle = t[:, None] * _inverse_frequencies(64)[None]
    emb = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return F.silu(F.linear(emb.to(weight.dtype), weight))


@idiom(lambda: {"x": _uniform(256, 3, low=-1.0), "bands": _normal(3, 32, scale=10)}, activations="", gradients=False)
def fourier_features_elementwise(x: Tensor, bands: Tensor) -> Tensor:
    angle = 2 * math.pi * (x[:, :, None] * bands[None]).sum(1)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


@idiom(lambda: {"t": _uniform(64, low=0.0, high=1.0), "bands": _normal(32, scale=16)}, activations="", gradients=False)
def gaussian_fourier_projection_of_diffusers(t: Tensor, bands: Tensor) -> Tensor:
    angle = torch.log(t)[:, None] * bands[None, :] * 2 * math.pi
    return torch.cat([torch.sin(angle), torch.cos(angle)], dim=-1)


@idiom(lambda: {"x": _uniform(128, 3, low=-1.0)}, activations="", gradients=False)
def nerf_encoding(x: Tensor) -> Tensor:
    powers = 2.0 ** torch.arange(10).float()
    angle = (x[..., None, :] * powers[:, None] * math.pi).flatten(-2)
    return torch.cat([x, angle.sin(), angle.cos()], dim=-1)


@idiom(lambda: {"mask": torch.ones(1, 40, 700)}, activations="", gradients=False)
def sine_positions_of_detr(mask: Tensor) -> Tensor:
    y, x = mask.cumsum(1, dtype=torch.float32), mask.cumsum(2, dtype=torch.float32)
    y, x = y / (y[:, -1:, :] + 1e-6) * 2 * math.pi, x / (x[:, :, -1:] + 1e-6) * 2 * math.pi
    scale = 10000 ** (2 * (torch.arange(16, dtype=torch.float32) // 2) / 16)
    x, y = x[..., None] / scale, y[..., None] / scale
    x = torch.stack((x[..., 0::2].sin(), x[..., 1::2].cos()), dim=4).flatten(3)
    y = torch.stack((y[..., 0::2].sin(), y[..., 1::2].cos()), dim=4).flatten(3)
    return torch.cat((y, x), dim=3)


@idiom(lambda: {"x": _normal(2, 300, 8), "keep": (torch.rand(2, 300) > 0.2).long()}, activations="", gradients=False)
def position_ids_by_cumsum(x: Tensor, keep: Tensor) -> Tensor:
    ids = torch.cumsum(keep, dim=1) - 1
    return ids.masked_fill(keep == 0, 1).float() * x[..., 0].sign().abs()


_begin("losses")


def _logits(scale: float = 4.0) -> Tensors:
    return {"x": _normal(32, 50, scale=scale), "target": torch.randint(0, 50, (32,))}


@idiom(lambda: _logits())
def label_smoothing_by_hand(x: Tensor, target: Tensor) -> Tensor:
    logprobs = F.log_softmax(x, dim=-1)
    nll = -logprobs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * logprobs.mean(dim=-1)).mean()


@idiom(lambda: _logits())
def cross_entropy_of_float32_logits(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


@idiom(lambda: _logits())
def cross_entropy_by_one_hot(x: Tensor, target: Tensor) -> Tensor:
    one_hot = F.one_hot(target, 50).float()
    return torch.sum(-one_hot * F.log_softmax(x, dim=-1), dim=-1).mean()


@idiom(lambda: _logits())
def perplexity(x: Tensor, target: Tensor) -> Tensor:
    return torch.exp(F.cross_entropy(x * 0.3, target))


@idiom(lambda: _logits(8))
def z_loss(x: Tensor, target: Tensor) -> Tensor:
    log_z = torch.logsumexp(x, dim=-1)
    return F.cross_entropy(x, target) + 1e-4 * (log_z**2).mean()


@idiom(lambda: {"x": _normal(2, 1, 64, 64, scale=2), "target": (torch.rand(2, 1, 64, 64) > 0.7).float()})
def dice_loss(x: Tensor, target: Tensor) -> Tensor:
    p = x.sigmoid().flatten(1)
    target = target.flatten(1)
    overlap = 2 * (p * target).sum(1)
    return (1 - (overlap + 1) / (p.sum(-1) + target.sum(-1) + 1)).mean()


@idiom(lambda: {"x": _normal(2, 1, 320, 320, scale=2), "target": (torch.rand(2, 1, 320, 320) > 0.3).float()})
def dice_loss_over_a_large_mask(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    intersection = torch.sum(p * target, dim=(1, 2, 3))
    union = torch.sum(p, dim=(1, 2, 3)) + torch.sum(target, dim=(1, 2, 3))
    return 1 - ((2.0 * intersection + 1e-5) / (union + 1e-5)).mean()


@idiom(lambda: {"x": _normal(64, 20, scale=3), "target": (torch.rand(64, 20) > 0.9).float()})
def sigmoid_focal_loss(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    ce = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    alpha = 0.25 * target + 0.75 * (1 - target)
    return (alpha * ce * (1 - p_t) ** 2).mean(1).sum() / 64


@idiom(
    lambda: {"x": _normal(64), "target": _normal(64), "variance": _uniform(64, low=0.5, high=2.0)},
    activations="x variance",
)
def gaussian_nll(x: Tensor, target: Tensor, variance: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, target, variance)


@idiom(lambda: {"x": _normal(64), "target": _normal(64), "variance": torch.full((64,), 1e-9)}, activations="x")
def gaussian_nll_of_tiny_variance(x: Tensor, target: Tensor, variance: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, target, variance)


@idiom(
    lambda: {"x": _normal(64, 8), "log_variance": _normal(64, 8), "target": _normal(64, 8)},
    activations="x log_variance",
)
def gaussian_nll_by_hand(x: Tensor, log_variance: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (log_variance + (target - x) ** 2 / log_variance.exp() + math.log(2 * math.pi)).sum(-1).mean()


@idiom(lambda: {"x": _normal(16, 64, scale=3), "teacher": _normal(16, 64, scale=3)}, activations="x teacher")
def distillation_by_kl(x: Tensor, teacher: Tensor) -> Tensor:
    student = F.log_softmax(x / 4.0, dim=-1)
    return F.kl_div(student, F.softmax(teacher / 4.0, dim=-1), reduction="batchmean") * 16.0


@idiom(
    lambda: {"x": _normal(16, 64, scale=0.5), "log_variance": _normal(16, 64, scale=0.5)}, activations="x log_variance"
)
def kl_of_a_variational_encoder(x: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * torch.sum(1 + log_variance - x.pow(2) - log_variance.exp(), dim=1).mean()


@idiom(lambda: {"x": _normal(64, 8, scale=2), "target": (torch.rand(64, 8) > 0.5).float()})
def binary_cross_entropy_after_sigmoid(x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast(device_type=x.device.type, enabled=False):  # torch refuses this loss under its own autocast
        return F.binary_cross_entropy(torch.sigmoid(x.float()), target)


@idiom(lambda: {"x": _uniform(64, low=6, high=14), "target": (torch.rand(64) > 0.5).float()}, activations="")
def saturated_sigmoid_and_loss_in_float32(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    with torch.autocast(device_type=x.device.type, enabled=False):
        return F.binary_cross_entropy(p.float(), target)


@idiom(lambda: {"x": _uniform(64, low=-14, high=14), "target": (torch.rand(64) > 0.5).float()})
def binary_cross_entropy_by_hand(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return -(target * torch.log(p + 1e-8) + (1 - target) * torch.log(1 - p + 1e-8)).mean()


@idiom(lambda: {"x": _uniform(64, low=-14, high=14), "target": (torch.rand(64) > 0.5).float()})
def binary_cross_entropy_by_hand_in_float32(x: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(x.float()).clamp(1e-7, 1 - 1e-7)
    return -(target * p.log() + (1 - target) * (1 - p).log()).mean()


@idiom(lambda: {"x": _uniform(64, low=6, high=14), "target": (torch.rand(64) > 0.5).float()})
def saturated_sigmoid_and_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(torch.logit(torch.sigmoid(x.float()), eps=1e-6), target)


@idiom(
    lambda: {"image": _normal(16, 64), "text": _normal(16, 64), "log_scale": torch.tensor(math.log(1 / 0.07))},
    activations="image text",
    weights="log_scale",
)
def contrastive_loss_of_clip(image: Tensor, text: Tensor, log_scale: Tensor) -> Tensor:
    image = image / image.norm(dim=1, keepdim=True)
    text = text / text.norm(dim=1, keepdim=True)
    logits = log_scale.exp() * image @ text.t()
    labels = torch.arange(16)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@idiom(lambda: {"x": _normal(32, 64)})
def contrastive_loss_of_simclr(x: Tensor) -> Tensor:
    z = F.normalize(x, dim=1)
    similarity = torch.exp(torch.mm(z, z.t()) / 0.1)
    others = similarity.masked_fill(torch.eye(32, dtype=torch.bool), 0.0).sum(-1)
    return -torch.log(similarity.roll(1, 1).diagonal() / others).mean()


@idiom(lambda: {"x": _normal(32, 64, scale=20), "other": _normal(32, 64, scale=20)}, activations="x other")
def cosine_distance(x: Tensor, other: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(x, other, dim=-1)).mean()


@idiom(lambda: {"x": _normal(64, 4, scale=3), "target": _normal(64, 4, scale=3)})
def huber_by_hand(x: Tensor, target: Tensor) -> Tensor:
    distance = (x - target).abs()
    return torch.where(distance < 1.0, 0.5 * distance**2, distance - 0.5).mean()


@idiom(lambda: {"x": _normal(16, 3, 32, 32, scale=100), "target": _normal(16, 3, 32, 32, scale=100)})
def mean_square_by_hand(x: Tensor, target: Tensor) -> Tensor:
    return ((x.float() - target) ** 2).mean()


@idiom(lambda: {"x": _normal(4, 3, 32, 32), "target": _normal(4, 3, 32, 32)})
def charbonnier_loss(x: Tensor, target: Tensor) -> Tensor:
    return torch.sqrt((x - target) ** 2 + 1e-6).mean()


@idiom(lambda: {"x": _normal(4, 16, 24, 24, scale=4)})
def gram_matrix_of_style(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    return flat.bmm(flat.transpose(1, 2)).div(flat.shape[1] * flat.shape[2])


@idiom(lambda: {"x": _normal(8, 16, scale=2), "advantage": _normal(8), "old": _normal(8, scale=0.1, shift=-2)})
def policy_ratio_of_ppo(x: Tensor, advantage: Tensor, old: Tensor) -> Tensor:
    log_p = F.log_softmax(x, dim=-1)[:, 0]
    ratio = torch.exp(log_p - old)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@idiom(lambda: {"x": _normal(16, 32, scale=3)})
def entropy_of_a_softmax(x: Tensor) -> Tensor:
    p = torch.softmax(x, dim=-1)
    return -(p * torch.log(p + 1e-9)).sum(-1).mean()


_begin("samplers")  # samplers and geometry


def _checker(size: int) -> Tensor:
    line = torch.arange(size)
    return ((line[:, None] + line[None, :]) % 2).float()[None, None]


def _identity_grid(size: int) -> Tensor:
    line = (torch.arange(size).float() + 0.5) * 2 / size - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((x, y), dim=-1)[None]


@idiom(lambda: {"x": _checker(512), "grid": _identity_grid(512)}, gradients=False)
def grid_sample_of_a_checkerboard(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, mode="bilinear", align_corners=False)


@idiom(lambda: {"x": _checker(1024)}, gradients=False)
def grid_sample_of_1024_pixels(x: Tensor) -> Tensor:
    grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 1024, 1024], align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", align_corners=False)


@idiom(
    lambda: {"x": _normal(1, 2, 32, 32), "theta": torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 1.1, 0.0]]])}, weights="theta"
)
def spatial_transformer(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta, [1, 2, 32, 32], align_corners=False)
    return F.grid_sample(x, grid.to(x.dtype), align_corners=False)


@idiom(lambda: {"theta": torch.eye(2, 3)[None] + _normal(2, 2, 3, scale=0.1)}, activations="theta")
def affine_grid_with_gradients(theta: Tensor) -> Tensor:
    return F.affine_grid(theta, [2, 1, 96, 96], align_corners=False)


@idiom(lambda: {"theta": torch.eye(2, 3)[None] + _normal(1, 2, 3, scale=0.1)}, activations="", weights="theta")
def affine_grid_of_a_large_image(theta: Tensor) -> Tensor:
    return F.affine_grid(theta, [1, 1, 512, 512], align_corners=True).pow(2).mean()


@idiom(lambda: {"x": _normal(1, 3, 96, 96), "flow": _normal(1, 2, 96, 96, scale=2)}, gradients=False)
def flow_warp(x: Tensor, flow: Tensor) -> Tensor:
    y, xx = torch.meshgrid(torch.arange(96).float(), torch.arange(96).float(), indexing="ij")
    moved = torch.stack((xx, y), 2)[None] + flow.permute(0, 2, 3, 1)
    grid = torch.stack((2.0 * moved[..., 0] / 95 - 1.0, 2.0 * moved[..., 1] / 95 - 1.0), dim=3)
    return F.grid_sample(x.float(), grid, align_corners=True)


@idiom(lambda: {"flow": _normal(1, 2, 12, 200, scale=3)}, activations="flow")
def coordinates_of_raft(flow: Tensor) -> Tensor:
    y, x = torch.meshgrid(torch.arange(12), torch.arange(200) + 1000, indexing="ij")
    return torch.stack([x, y], dim=0).float()[None] + flow


def _boxes(count: int, size: float = 4096.0) -> Tensor:
    corner = torch.rand(count, 2) * size * 0.7
    return torch.cat([corner, corner + torch.rand(count, 2) * size * 0.3 + 8], dim=1)


@idiom(lambda: {"x": _boxes(64)}, activations="", gradients=False)
def box_areas(x: Tensor) -> Tensor:
    return (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])


@idiom(lambda: {"x": _boxes(64), "other": _boxes(32)}, activations="", gradients=False)
def box_iou(x: Tensor, other: Tensor) -> Tensor:
    area_x = (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])
    area_other = (other[:, 2] - other[:, 0]) * (other[:, 3] - other[:, 1])
    low = torch.max(x[:, None, :2], other[:, :2])
    high = torch.min(x[:, None, 2:], other[:, 2:])
    inter = (high - low).clamp(min=0).prod(dim=2)
    return inter / (area_x[:, None] + area_other - inter)


@idiom(lambda: {"x": _normal(64, 4, scale=0.2), "anchors": _boxes(64)})
def decode_boxes_from_deltas(x: Tensor, anchors: Tensor) -> Tensor:
    size = anchors[:, 2:] - anchors[:, :2]
    centre = anchors[:, :2] + 0.5 * size
    new_centre = x[:, :2] * size + centre
    new_size = torch.exp(x[:, 2:].clamp(max=math.log(1000.0 / 16))) * size
    return torch.cat([new_centre - 0.5 * new_size, new_centre + 0.5 * new_size], dim=1)


@idiom(lambda: {"x": _boxes(64)}, activations="", gradients=False)
def level_of_a_region(x: Tensor) -> Tensor:
    area = (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])
    return torch.floor(4 + torch.log2(torch.sqrt(area) / 224 + 1e-6)).clamp(2, 5)


@idiom(lambda: {"x": torch.zeros(1, 1, 200, 300)}, gradients=False)
def anchor_grid_of_a_detector(x: Tensor) -> Tensor:
    shift_x, shift_y = torch.arange(0, 300) * 16.0, torch.arange(0, 200) * 16.0
    y, xx = torch.meshgrid(shift_y, shift_x, indexing="ij")
    shifts = torch.stack((xx.reshape(-1), y.reshape(-1), xx.reshape(-1), y.reshape(-1)), dim=1)
    anchors = torch.tensor([[-22.6, -11.3, 22.6, 11.3], [-16.0, -16.0, 16.0, 16.0]])
    return (shifts.view(-1, 1, 4) + anchors.view(1, -1, 4)).reshape(-1, 4)


@idiom(lambda: {"x": _normal(16, 32, scale=4)})
def softmax_with_temperature(x: Tensor) -> Tensor:
    return F.softmax(x / 0.1, dim=-1)


@idiom(lambda: {"x": _normal(16, 32), "noise": _uniform(16, 32, low=1e-5)})
def gumbel_softmax_by_hand(x: Tensor, noise: Tensor) -> Tensor:
    gumbel = -torch.log(-torch.log(noise + 1e-20) + 1e-20)
    return F.softmax((x + gumbel) / 0.5, dim=-1)


@idiom(lambda: {"x": _uniform(2, 20000)})
def cumsum_over_a_long_axis(x: Tensor) -> Tensor:
    return torch.cumsum(x, dim=-1)


@idiom(lambda: {"x": _normal(4, 500, scale=5)}, gradients=False)
def nucleus_of_a_sampler(x: Tensor) -> Tensor:
    ordered, _ = torch.sort(x, descending=True)
    return torch.cumsum(F.softmax(ordered, dim=-1), dim=-1)


@idiom(lambda: {"x": _normal(8, 40), "values": _normal(8, 40, 6)}, activations="x values")
def top_k_and_gather(x: Tensor, values: Tensor) -> Tensor:
    top, index = x.topk(5, dim=-1)
    picked = values.gather(1, index[..., None].expand(-1, -1, 6))
    return (picked * top.softmax(-1)[..., None]).sum(1)


@idiom(lambda: {"x": torch.randint(0, 20, (4, 9)), "weight": _normal(20, 16)}, activations="", weights="weight")
def embedding_by_one_hot(x: Tensor, weight: Tensor) -> Tensor:
    return F.one_hot(x, 20).to(weight.dtype) @ weight


@idiom(lambda: {"x": torch.randint(0, 20, (4, 9)), "weight": _normal(20, 16)}, activations="", weights="weight")
def scaled_embedding(x: Tensor, weight: Tensor) -> Tensor:
    hidden = F.embedding(x, weight)
    return hidden * torch.tensor(2048**0.5, dtype=hidden.dtype)


@idiom(lambda: {"x": _normal(2, 4, 32, 32), "noise": _normal(2, 4, 32, 32), "t": torch.tensor([20, 900])})
def noising_of_a_diffusion_model(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    alphas = torch.cumprod(1.0 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float32) ** 2, dim=0)
    keep = alphas[t].sqrt().view(-1, 1, 1, 1)
    return keep * x + (1 - alphas[t]).sqrt().view(-1, 1, 1, 1) * noise


@idiom(lambda: {"x": _normal(2, 4, 32, 32), "noise": _normal(2, 4, 32, 32)}, activations="x noise")
def sampler_step_of_a_diffusion_model(x: Tensor, noise: Tensor) -> Tensor:
    alpha, before = torch.tensor(0.0047), torch.tensor(0.0099)
    clean = (x - (1 - alpha) ** 0.5 * noise) / alpha**0.5
    return before**0.5 * clean + (1 - before) ** 0.5 * noise


@idiom(lambda: {"x": _normal(2, 4, 32, 32), "text": _normal(2, 4, 32, 32)}, activations="x text")
def classifier_free_guidance(x: Tensor, text: Tensor) -> Tensor:
    guided = x + 7.5 * (text - x)
    ratio = text.std(dim=[1, 2, 3], keepdim=True) / guided.std(dim=[1, 2, 3], keepdim=True)
    return 0.7 * (guided * ratio) + 0.3 * guided


_begin("paddle")  # as Paddle's model zoo writes it


@idiom(lambda: {"x": _normal(2, 19, 32, 32, scale=3), "target": torch.randint(0, 19, (2, 32, 32))})
def ohem_of_paddleseg(x: Tensor, target: Tensor) -> Tensor:
    p = F.softmax(x, dim=1)
    flat = p.permute(1, 0, 2, 3).reshape(19, -1)
    chosen = (flat * F.one_hot(target.reshape(-1), 19).t().to(flat.dtype)).sum(0)
    keep = (chosen < 0.7).to(x.dtype).reshape(2, 32, 32)
    loss = F.cross_entropy(x, target, reduction="none") * keep
    return loss.mean() / (keep.mean() + 1e-8)


@idiom(lambda: {"x": _normal(2, 4, 24, 24, scale=4), "target": (torch.rand(2, 4, 24, 24) > 0.5).float()})
def ctc_head_and_balanced_loss_of_paddleocr(x: Tensor, target: Tensor) -> Tensor:
    shrink = torch.reciprocal(1 + torch.exp(-50 * (torch.sigmoid(x) - 0.3)))
    positive = (target * shrink).sum()
    negative = ((1 - target) * shrink).sum()
    return 1 - 2.0 * positive / (positive + negative + target.sum() + 1e-6)


@idiom(lambda: {"x": _normal(64, 4, 17, scale=2), "anchor": _uniform(64, 2, high=1280.0)})
def distribution_to_boxes_of_ppyoloe(x: Tensor, anchor: Tensor) -> Tensor:
    project = torch.linspace(0, 16, 17)
    distance = F.softmax(x, dim=-1).matmul(project.to(x.dtype)) * 32.0
    left_top, right_bottom = distance.split(2, -1)
    return torch.cat([anchor - left_top, anchor + right_bottom], -1)


@idiom(lambda: {"x": _normal(16, 32, scale=3), "weight": _normal(32, 100)}, weights="weight")
def angular_margin_of_arcface(x: Tensor, weight: Tensor) -> Tensor:
    cosine = torch.mm(F.normalize(x, dim=1), F.normalize(weight, dim=0)).float()
    sine = torch.sqrt(1.0 - torch.square(cosine) + 1e-6)
    return 64.0 * (cosine * math.cos(0.5) - sine * math.sin(0.5))


_begin("einsum")  # einsum without and with a contraction


@idiom(lambda: {"x": _normal(6, 5, scale=1e5)}, activations="")
def einsum_transpose(x: Tensor) -> Tensor:
    return torch.einsum("ij->ji", x)


@idiom(lambda: {"x": _normal(6, 50, scale=1e5)}, activations="")
def einsum_row_sums(x: Tensor) -> Tensor:
    return torch.einsum("ij->i", x)


@idiom(lambda: {"x": _normal(6, 6, scale=1e5)}, activations="")
def einsum_diagonal(x: Tensor) -> Tensor:
    return torch.einsum("ii->i", x)


@idiom(lambda: {"x": _normal(6, 6, scale=1e5)}, activations="")
def einsum_trace(x: Tensor) -> Tensor:
    return torch.einsum("ii", x)


@idiom(lambda: {"x": _normal(6, 5, scale=1e3), "other": _normal(6, 5, scale=1e3)}, activations="")
def einsum_elementwise(x: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("ij,ij->ij", x, other)


@idiom(lambda: {"x": _normal(6, scale=1e3), "other": _normal(5, scale=1e3)}, activations="")
def einsum_outer(x: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("i,j->ij", x, other)


@idiom(lambda: {"x": _normal(2, 6, 5), "other": _normal(2, 6)}, activations="x other")
def einsum_scale_of_rows(x: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("bij,bi->bij", x, other)


@idiom(lambda: {"x": _normal(2, 6, 5), "other": _normal(2, 5, 7)}, activations="x other")
def einsum_batched_product(x: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", x, other)


@idiom(lambda: {"x": _normal(2, 6, 8), "other": _normal(2, 9, 8)}, activations="x other")
def einsum_with_ellipsis(x: Tensor, other: Tensor) -> Tensor:
    return torch.einsum("...id,...jd->...ij", x, other)


_begin("layers")  # feed-forward, routing, recurrence, shapes


@idiom(
    lambda: {
        "x": _normal(8, 32),
        "up": _normal(64, 32, scale=0.2),
        "gate": _normal(64, 32, scale=0.2),
        "down": _normal(32, 64, scale=0.2),
    },
    weights="up gate down",
)
def swiglu(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@idiom(lambda: {"x": _normal(8, 32), "weight": _normal(128, 32, scale=0.2)}, weights="weight")
def geglu(x: Tensor, weight: Tensor) -> Tensor:
    value, gate = F.linear(x, weight).chunk(2, dim=-1)
    return value * F.gelu(gate)


@idiom(lambda: {"x": _normal(8, 64, scale=2)})
def gelu_of_gpt2_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@idiom(lambda: {"x": _normal(8, 64, scale=2)})
def squared_relu(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


@idiom(
    lambda: {"x": _normal(32, 16), "router": _normal(8, 16, scale=0.3), "experts": _normal(8, 16, 16, scale=0.2)},
    weights="router experts",
)
def routing_of_a_mixture_of_experts(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    logits = F.linear(x.float(), router.float())
    weight, chosen = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), 2, dim=-1)
    weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
    out = torch.zeros_like(x)
    for e in range(8):
        token, slot = torch.where(chosen == e)
        out.index_add_(0, token, ((x[token] @ experts[e]) * weight[token, slot, None]).to(x.dtype))
    return out


@idiom(lambda: {"x": _normal(64, 8)})
def load_balancing_loss(x: Tensor) -> Tensor:
    p = F.softmax(x, dim=-1, dtype=torch.float)
    share = F.one_hot(p.argmax(-1), 8).float().mean(0)
    return 8 * torch.sum(share * p.mean(0))


@idiom(
    lambda: {"x": _normal(2, 64, 8), "decay": _normal(8, scale=0.3), "step": _normal(2, 64, 8)},
    activations="x step",
    weights="decay",
)
def state_space_scan_of_mamba(x: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    a = -torch.exp(decay.float())
    delta = F.softplus(step.float())
    keep = torch.exp(delta * a)
    state, out = torch.zeros_like(keep[:, 0]), []
    for i in range(16):
        state = keep[:, i] * state + delta[:, i] * x[:, i]
        out.append(state)
    return torch.stack(out, 1)


@idiom(lambda: {"x": _normal(2, 200, 4, scale=0.2)})
def decay_by_cumsum_of_logarithms(x: Tensor) -> Tensor:
    log_decay = F.logsigmoid(x.float() + 4)
    total = log_decay.cumsum(1)
    return torch.exp(total - total[:, -1:])


@idiom(lambda: {"x": _normal(2, 16, 8, 8), "weight": _normal(16, 16, 3, 3, scale=0.1)}, weights="weight")
def pixel_shuffle_after_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.pixel_shuffle(F.conv2d(x, weight, padding=1), 2)


@idiom(
    lambda: {"x": _normal(2, 16, 8, 8), "squeeze": _normal(4, 16, scale=0.3), "excite": _normal(16, 4, scale=0.3)},
    weights="squeeze excite",
)
def squeeze_and_excitation(x: Tensor, squeeze: Tensor, excite: Tensor) -> Tensor:
    s = F.linear(F.relu(F.linear(x.mean((2, 3)), squeeze)), excite)
    return x * s.sigmoid()[:, :, None, None]


@idiom(lambda: {"x": _normal(2, 16, 8, 8, scale=50), "gamma": torch.full((16,), 1e-6)}, weights="gamma")
def layer_scale_of_a_residual(x: Tensor, gamma: Tensor) -> Tensor:
    return x + gamma[:, None, None] * x


@idiom(lambda: {"x": _normal(2, 16, 8, 8), "keep": torch.tensor([1.0, 0.0])})
def stochastic_depth(x: Tensor, keep: Tensor) -> Tensor:
    return x * (keep / 0.9).view(-1, 1, 1, 1).to(x.dtype) + x


@idiom(lambda: {"x": _normal(2, 8, 16, 16), "weight": _uniform(8, low=2.0, high=3.5)}, weights="weight")
def generalised_mean_pooling(x: Tensor, weight: Tensor) -> Tensor:
    clamped = x.clamp(min=1e-6)
    return clamped.pow(weight[:, None, None]).mean((2, 3)).pow(1.0 / weight)


@idiom(lambda: {"x": _normal(2, 8, 16, 16, scale=2)})
def soft_argmax_of_a_heatmap(x: Tensor) -> Tensor:
    p = F.softmax(x.flatten(2), dim=-1).view_as(x)
    line = torch.arange(16, dtype=torch.float32)
    return torch.stack([(p.sum(2) * line).sum(-1), (p.sum(3) * line).sum(-1)], -1)


@idiom(lambda: {"x": _normal(2, 4, 12, 12)})
def max_pooling_and_its_unpooling(x: Tensor) -> Tensor:
    pooled, index = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, index, 2)


@idiom(
    lambda: {
        "x": _normal(2, 4, 12, 12),
        "weight": _normal(8, 4, 3, 3, scale=0.2),
        "gain": torch.ones(8),
        "bias": torch.zeros(8),
    },
    weights="weight",
)
def convolution_and_batch_norm(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    hidden = F.conv2d(x, weight, padding=1)
    return F.max_pool2d(F.relu(F.batch_norm(hidden, None, None, gain, bias, training=True)), 3, 2, 1)


@idiom(lambda: {"x": _normal(2, 8, 14, 14)})
def resized_position_embedding(x: Tensor) -> Tensor:
    return F.interpolate(x.float(), size=(24, 24), mode="bicubic", antialias=True, align_corners=False)


_begin("arithmetic")  # arithmetic with a wide range


@idiom(lambda: {"x": _normal(5, 5, scale=3)}, activations="")
def matrix_exponential(x: Tensor) -> Tensor:
    return torch.matrix_exp(x)


@idiom(lambda: {"x": _normal(4, 3, 3, scale=0.2)})
def matrix_exponential_of_half_input(x: Tensor) -> Tensor:
    return torch.matrix_exp(x.float() - x.float().transpose(1, 2))


@idiom(lambda: {"x": _uniform(5, low=-4, high=4)}, activations="")
def vandermonde_matrix(x: Tensor) -> Tensor:
    return torch.linalg.vander(x, N=6)


@idiom(lambda: {"x": _uniform(5, low=-4, high=4)})
def vandermonde_matrix_of_activations(x: Tensor) -> Tensor:
    return torch.linalg.vander(x)


@idiom(lambda: {"x": _normal(3, 3, scale=0.3)})
def matrix_exponential_of_activations(x: Tensor) -> Tensor:
    return torch.matrix_exp(x - x.t())


@idiom(lambda: {"x": _normal(64, scale=5e4)}, activations="")
def clamp_beyond_float16(x: Tensor) -> Tensor:
    return torch.clamp(x, -7e4, 7e4)


@idiom(lambda: {"x": _normal(64, scale=500)})
def clamp_of_overflow_in_t5(x: Tensor) -> Tensor:
    bound = torch.finfo(x.dtype).max - 1000
    return torch.clamp(x, min=-bound, max=bound)


@idiom(lambda: {"x": _normal(64, scale=500)})
def clamp_of_half_activations_beyond_float16(x: Tensor) -> Tensor:
    return x.clamp(-7e4, 7e4)


@idiom(lambda: {"x": torch.eye(4) + _normal(4, 4, scale=0.1)}, activations="")
def matrix_power(x: Tensor) -> Tensor:
    return torch.linalg.matrix_power(x, 5)


@idiom(lambda: {"x": _normal(4, 64), "filters": _normal(33, scale=0.5)}, weights="filters")
def filter_in_the_frequency_domain(x: Tensor, filters: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x.float(), dim=-1, norm="ortho")
    return torch.fft.irfft(spectrum * filters.float(), n=64, dim=-1, norm="ortho").to(x.dtype)


@idiom(lambda: {"x": _normal(64, scale=1e5), "other": _normal(64, scale=1e5)}, activations="")
def sums_and_products_of_large_numbers(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return x + other, x * 0.5 - other / 3


@idiom(lambda: {"x": _uniform(1000, 1000, low=0.5, high=1.5)})
def mean_of_a_million(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(), x.float().sum()


@idiom(lambda: {"x": _normal(4, 50000, scale=3, shift=10)})
def spread_over_a_long_axis(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.var(dim=-1), x.std(dim=-1, keepdim=True)


@idiom(lambda: {"x": _normal(4, 70000)})
def sum_over_a_long_axis(x: Tensor) -> Tensor:
    return (x.float() ** 2).sum(dim=-1)


@idiom(lambda: {"x": _normal(4, 4000, scale=8)})
def logsumexp_over_a_long_axis(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


@idiom(lambda: {"x": _uniform(64, low=-1e-3, high=1e-3)}, activations="")
def small_arguments_of_log1p_and_expm1(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.log1p(x), torch.expm1(x)


@idiom(lambda: {"x": _uniform(64, low=0.1, high=30)})
def powers(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.float() ** 3, torch.pow(x.float(), 2.5)


@idiom(lambda: {"x": _uniform(4, 200, low=0.97, high=1.0)})
def cumprod_of_transmittance(x: Tensor) -> Tensor:
    return torch.cumprod(x.float(), dim=-1)


@idiom(lambda: {"x": _normal(64), "end": _normal(64), "weight": _uniform(64)}, activations="x end")
def lerp_by_float32_weight(x: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(x, end, weight.to(x.dtype))


@idiom(lambda: {"x": _normal(64, scale=100), "a": _normal(64, scale=100), "b": _normal(64, scale=100)}, activations="")
def addcmul_in_float32(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addcmul(x, a, b, value=0.5)


@idiom(lambda: {"average": _normal(64), "x": _normal(64)}, activations="", gradients=False)
def moving_average_written_functionally(average: Tensor, x: Tensor) -> Tensor:
    for _ in range(20):
        average = 0.9999 * average + (1 - 0.9999) * x
    return average - x


@idiom(lambda: {"average": _normal(64), "x": _normal(64)}, activations="x", gradients=False)
def moving_average_in_place(average: Tensor, x: Tensor) -> Tensor:
    average = average.clone()
    for _ in range(20):
        average.mul_(0.999).add_(x.detach(), alpha=1 - 0.999)
    return average


@idiom(lambda: {"x": _normal(64, scale=10)})
def where_with_a_float32_scalar(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.tensor(0.01)) * torch.where(x > 3, 2.0, 0.5)


@idiom(lambda: {"x": _normal(64), "scale": torch.tensor(0.3)}, weights="scale")
def zero_dimensional_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale + scale.exp() * x / (1 + scale)


@idiom(lambda: {"x": _normal(8, 64, scale=1e-4)}, activations="")
def small_numbers_squared(x: Tensor) -> Tensor:
    return (x * x).sum(-1).sqrt()


@idiom(lambda: {"x": _uniform(64, low=1.0, high=1.001)}, activations="")
def difference_of_near_numbers(x: Tensor) -> Tensor:
    return (x - 1.0) * 1000.0


@idiom(lambda: {"x": torch.arange(3000)}, activations="", gradients=False)
def integers_beyond_half_precision(x: Tensor) -> Tensor:
    return torch.remainder(x.float() * 3 + 1, 7.0)


@idiom(lambda: {"x": _uniform(2, 3, 16, 16, low=0.0, high=255.0)}, activations="", gradients=False)
def image_normalisation(x: Tensor) -> Tensor:
    mean = torch.tensor([123.675, 116.28, 103.53]).view(1, 3, 1, 1)
    return (x - mean) / torch.tensor([58.395, 57.12, 57.375]).view(1, 3, 1, 1)


@idiom(lambda: {"x": _normal(3, 500), "window": torch.hann_window(64)}, activations="", gradients=False)
def log_mel_spectrogram(x: Tensor, window: Tensor) -> Tensor:
    spectrum = torch.stft(x, 64, 32, window=window, return_complex=True)
    power = spectrum.real.pow(2) + spectrum.imag.pow(2)
    return torch.log10(power.clamp(min=1e-10))


@idiom(lambda: {"x": _normal(8, 3, scale=100), "other": _normal(9, 3, scale=100)}, activations="x other")
def pairwise_distances_by_expansion(x: Tensor, other: Tensor) -> Tensor:
    a, b = x.float(), other.float()
    squares = (a**2).sum(-1)[:, None] + (b**2).sum(-1)[None] - 2 * (a[:, None] * b[None]).sum(-1)
    return squares.clamp(min=0).sqrt()


@idiom(lambda: {"x": _normal(8, 3, scale=100), "other": _normal(9, 3, scale=100)}, activations="x other")
def pairwise_distances(x: Tensor, other: Tensor) -> Tensor:
    return torch.cdist(x, other)


@idiom(lambda: {"x": _normal(4, 6)}, activations="x")
def rotation_from_six_numbers(x: Tensor) -> Tensor:
    a, b = x[..., :3], x[..., 3:]
    first = F.normalize(a, dim=-1)
    second = F.normalize(b - (first * b).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack((first, second, torch.cross(first, second, dim=-1)), dim=-2)
