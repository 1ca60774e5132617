"""Level O3: which calls of matrix products are FP8, and the layers that stay in half."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase

from mezzo._torch.autocast_state import HALF_LAYER_DEVICE, is_any_autocast_enabled
from mezzo._torch.autograd_engine import has_forward_mode
from mezzo._torch.fake_tensors import FakeTensor, FunctionalTensor
from mezzo._torch.functorch import innermost_transform
from mezzo._torch.layers import ConvNd
from mezzo.amp._exclude import Excluded, ExclusionHandle, find_excluded, is_excluded, wrap_forward
from mezzo.amp._policy import CASTABLE, Policy
from mezzo.fp8 import GatheredWeight, fp8_linear, recipe_to_text, warn_of_half_use

_MARK = "_mezzo_forward_before_half"
_PLAIN = (Tensor, nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)
_OTHER_FP8 = ("torchao", "transformer_engine")
"""Packages whose layers compute in FP8 by themselves."""
_LAYERS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, ConvNd, RNNBase)

Product = tuple[Tensor, Tensor, Tensor | None]
"""Input [..., inputs], weight [outputs, inputs] and bias."""


def _of_linear(args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    is_plain = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    return (x, weight, bias) if is_plain else None


def _of_matmul(args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    x, other = args[:2]
    return (x, other.t(), None) if x.dim() > 1 and other.dim() == 2 else None


def _of_addmm(args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    bias, x, other = args[:3]
    is_plain = bias.dim() == 1 and kwargs.get("beta", 1) == 1 and kwargs.get("alpha", 1) == 1 and len(args) == 3
    return (x, other.t(), bias) if is_plain and bias.shape[0] == other.shape[1] else None


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any]], Product | None]] = {
    "linear": _of_linear,
    "matmul": _of_matmul,
    "mm": _of_matmul,
    "addmm": _of_addmm,
}
"""Operators that can be FP8, and functions that read a call as input, weight and bias."""


def has_fp8(policy: Policy, op: str) -> bool:
    """Whether calls of an operator may be FP8 under a policy: products that its lists make half."""
    return policy.fp8 is not None and op in PRODUCTS and op in policy.white


def fp8_call(policy: Policy, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of a product in FP8; None if it must be computed in half. Call it with autocast off."""
    assert policy.fp8 is not None
    # mezzo's operator has no rule for torch.func and no forward derivative.
    if torch.is_autocast_enabled(HALF_LAYER_DEVICE) or innermost_transform() is not None or has_forward_mode():
        return None
    product = PRODUCTS[op](args, kwargs)
    if product is None:
        return None
    x, weight, bias = product
    own = (x, bias) if isinstance(weight, GatheredWeight) else product
    if not all(_is_plain(tensor) for tensor in own if tensor is not None):
        return None
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return None  # an error, which torch explains well
    inputs = weight.shape[1]
    reason = policy.fp8.why_half(x.numel() // inputs if inputs else 0, inputs, weight.shape[0])
    if reason is not None:
        if isinstance(weight, GatheredWeight):
            warn_of_half_use(f"a product of {op} is not FP8 ({reason})")
        return None
    half = policy.dtype
    bias = None if bias is None else bias.to(half)
    return fp8_linear(x.to(half), weight.to(half), bias, recipe_to_text(policy.fp8))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, floating and not a subclass with its own rules, such as a DTensor."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.dtype in CASTABLE and is_dense and (type(tensor) in _PLAIN or isinstance(tensor, _TRACED))


def keep_in_half(model: nn.Module, layers: Excluded | Sequence[Excluded] | None) -> ExclusionHandle:
    """Compute the products of some modules in half at level O3, as at O2; other levels are not affected.

    Args:
        model: The model to search.
        layers: Modules, module types or name globs, as in `exclude_layers`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> handle = keep_in_half(net, "0")
    """
    modules = [m for m in find_excluded(model, layers, "half_layers") if not stays_in_half(m) and not is_excluded(m)]
    for module in modules:
        wrap_forward(module, _MARK, _forward_in_half)
    return ExclusionHandle(modules, _MARK)


def refuse_other_fp8(model: nn.Module, spared: Sequence[nn.Module]) -> None:
    """Raise ValueError if O3 would quantise operands of layers that another library quantises already.

    Args:
        model: The model to search.
        spared: Modules that O3 leaves alone: excluded ones, and those that stay in half.
    """
    left_alone = {id(part) for module in spared for part in module.modules()}
    for name, module in model.named_modules():
        kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] in _OTHER_FP8]
        has_matrix = any(param.dim() > 1 for param in module.parameters(recurse=False))  # norms have none
        if kinds and has_matrix and id(module) not in left_alone:
            raise ValueError(
                f"level O3: {name or 'the model'!r} is a {kinds[0].__module__}.{kinds[0].__qualname__}, which computes in "
                "FP8 by itself, and O3 would quantise twice; use O2 with it, or O3 without it, or name it in half_layers"
            )


def fp8_weights(model: nn.Module, policy: Policy, spared: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the weights that only FP8 products use, if the inputs have enough rows.

    Args:
        model: The model to search.
        policy: Of level O3.
        spared: Modules that O3 leaves alone: excluded ones, and those that stay in half.
    """
    if policy.fp8 is None or not has_fp8(policy, "linear"):
        return []
    marked = [m for m in model.modules() if stays_in_half(m) or is_excluded(m) or isinstance(m, nn.MultiheadAttention)]
    left_alone = {id(part) for module in (*spared, *marked) for part in module.modules()}
    found: dict[int, nn.Parameter] = {}
    others: set[int] = set()
    for module in model.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        # By the instance: `layer.forward = ...` may compute something else, too
        is_plain = getattr(module.forward, "__func__", None) is nn.Linear.forward and id(module) not in left_alone
        if is_plain and "weight" in own and policy.fp8.why_half(None, *own["weight"].shape[::-1]) is None:
            weight = own.pop("weight")
            found[id(weight)] = weight
        others |= {id(param) for param in own.values()}
    return [param for key, param in found.items() if key not in others]


def stays_in_half(module: nn.Module) -> bool:
    """Whether `keep_in_half` was called for this module, not only for a parent."""
    return _MARK in module.__dict__


def first_and_last(model: nn.Module) -> list[nn.Module]:
    """Return the first and the last layer with weights of a model, in the order of definition.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> first_and_last(net)
    [Embedding(9, 4), Linear(in_features=4, out_features=9, bias=True)]
    """
    # nn.MultiheadAttention uses the weights of the layers inside it without calling them.
    inside = {
        id(part) for each in model.modules() if isinstance(each, nn.MultiheadAttention) for part in each.children()
    }
    layers = [module for module in model.modules() if isinstance(module, _LAYERS) and id(module) not in inside]
    return [*layers[:1], *(layers[-1:] if len(layers) > 1 else [])]


def _forward_in_half(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = module.__dict__[_MARK]
    forward = functools.partial(type(module).forward, module) if own is None else own
    if not is_any_autocast_enabled():  # nothing is FP8 then, and an exported module has no region in it
        return forward(*args, **kwargs)
    with torch.autocast(HALF_LAYER_DEVICE, dtype=torch.bfloat16):
        return forward(*args, **kwargs)
