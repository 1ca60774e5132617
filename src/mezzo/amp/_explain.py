"""`explain`: which list or rule decides the precision of an operator, or of each layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mezzo.amp._exclude import is_excluded
from mezzo.amp._fp8 import has_fp8, stays_in_half
from mezzo.amp._names import resolve_name
from mezzo.amp._policy import Decision, Policy
from mezzo.amp._state import current_policy
from mezzo.dtypes import dtype_name
from mezzo.fp8 import MULTIPLE
from mezzo.report import text_table

#: Leaf modules whose forward is one operator.
_MODULE_OPS: dict[str, str] = {
    "NonDynamicallyQuantizableLinear": "linear",
    "SyncBatchNorm": "batch_norm",
    "Softmax2d": "softmax",
    "CrossEntropyLoss": "cross_entropy_loss",
    "NLLLoss": "nll_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "KLDivLoss": "kl_div",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "CTCLoss": "ctc_loss",
    "Dropout": "dropout",
    "PReLU": "prelu",
    "SiLU": "silu",
    "ELU": "elu",
    "GELU": "gelu",
    "SELU": "selu",
    "CELU": "celu",
    "GLU": "glu",
    "ReLU6": "hardtanh",
    "LeakyReLU": "leaky_relu",
    "LogSoftmax": "log_softmax",
    "LogSigmoid": "log_sigmoid",
    "Upsample": "interpolate",
    "UpsamplingBilinear2d": "upsample_bilinear2d",
    "UpsamplingNearest2d": "upsample_nearest2d",
    "EmbeddingBag": "embedding_bag",
    "RMSNorm": "rms_norm",
    "LSTM": "lstm",
    "GRU": "gru",
    "RNN": "rnn_tanh",
}
_SUFFIXED = ("Linear", "Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "LayerNorm", "GroupNorm", "Embedding", "ReLU",
             "Sigmoid", "Tanh", "Softmax", "Softplus", "Hardswish", "Hardsigmoid", "Hardtanh", "Mish", "MaxPool",
             "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Bilinear")  # fmt: skip
_SNAKE = {"ConvTranspose": "conv_transpose", "BatchNorm": "batch_norm", "InstanceNorm": "instance_norm",
          "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "MaxPool": "max_pool", "AvgPool": "avg_pool",
          "AdaptiveAvgPool": "adaptive_avg_pool", "AdaptiveMaxPool": "adaptive_max_pool"}  # fmt: skip
_WITHOUT_DIMS = ("batch_norm", "instance_norm")
_FP8 = "float8_e4m3"


@dataclass(frozen=True, slots=True)
class ExplanationRow:
    """The decision for one operator variant, or for one layer of a model."""

    name: str
    op: str
    on_float32: str
    """Result for float32 inputs."""
    on_half: str
    """Result for half inputs."""
    reason: str
    why_half: str | None = None
    """O3, for layers that are matrix products: why it is not FP8; empty if it is."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `explain`; it prints as a table."""

    policy: Policy
    rows: tuple[ExplanationRow, ...]

    def __str__(self) -> str:
        title = f"level {self.policy.level}, {dtype_name(self.policy.dtype)}, lists {self.policy.digest}"
        header = ExplanationRow("name", "operator", "float32 input", "half input", "decided by")
        cells = [[r.name, r.op, r.on_float32, r.on_half, r.reason] for r in (header, *self.rows)]
        return "\n".join([title, *text_table(cells)])

    def fp8_layers(self, computed: Collection[str] | None = None) -> str:
        """Return one line: how many linear layers are FP8 at O3, which are not, and why.

        Args:
            computed: Layers that were FP8 in a recorded step; others that could be FP8 are then listed with a reason.
        """
        assert self.policy.fp8 is not None
        reasons = {row.name: row.why_half for row in self.rows if row.why_half is not None}
        few = f"its rows are fewer than min_size {self.policy.fp8.min_size} asks or not a multiple of {MULTIPLE}"
        for name, why in reasons.items():
            if not why and computed is not None and name not in computed:
                reasons[name] = few
        by_reason: dict[str, list[str]] = {}
        for name, why in reasons.items():
            by_reason.setdefault(why, []).append(name or "the model itself")
        in_fp8 = by_reason.pop("", [])
        others = "".join(f"; {_some(names)}: {why}" for why, names in by_reason.items())
        return f"{len(in_fp8)} of {len(reasons)} linear layers are FP8{others}"


_MOST_NAMES = 8


def _some(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    left = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {left} more" if left > 0 else "")


def explain(target: str | nn.Module | Callable[..., Any], policy: Policy | None = None, **options: Any) -> Explanation:
    """Return which list or rule decides the precision of an operator, or of every layer of a model.

    Args:
        target: An operator name (`softmax`, `elementwise_add`), a torch function, or a module.
        policy: The policy to ask. Default: one made from `options`, otherwise the active one.
        options: `level`, `dtype`, `custom_white_list`, `custom_black_list`, `use_promote`, `fp8`, as for `auto_cast`.

    >>> print(explain("softmax", level="O2"))  # doctest: +ELLIPSIS
    level O2, float16, lists ...
    name     operator  float32 input  half input                     decided by
    softmax  softmax   float32        float16 (computed in float32)  fp32 inside, promoted ...
    """
    if policy is None:
        policy = Policy.create(**options) if options else current_policy() or Policy.create()
    elif options:
        raise TypeError(f"explain: give a policy or {', '.join(options)}, not both")
    if isinstance(target, nn.Module):
        return Explanation(policy, tuple(_module_rows(target, policy)))
    name = target if isinstance(target, str) else getattr(target, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(f"explain: {target!r} is neither an operator name, a torch function nor a module")
    variants = sorted(resolve_name(name))
    if not variants:
        raise ValueError(f"{name!r} is a document's name without a torch operator: lists accept it without effect")
    return Explanation(policy, tuple(_row(variant, variant, policy) for variant in variants))


def _row(name: str, op: str, policy: Policy, module: nn.Module | None = None, is_kept: bool = False) -> ExplanationRow:
    on_float32, on_half = policy.decide(op, (torch.float32,)), policy.decide(op, (policy.dtype,))
    reasons = dict.fromkeys((on_float32.reason, on_half.reason))
    row = ExplanationRow(name, op, _result(on_float32), _result(on_half), " / ".join(reasons))
    return _with_fp8(row, policy, module, is_kept) if has_fp8(policy, op) else row


def _with_fp8(row: ExplanationRow, policy: Policy, module: nn.Module | None, is_kept: bool) -> ExplanationRow:
    """Return the row of a product at O3, with FP8 or the reason why it stays in half."""
    recipe, half = policy.fp8, dtype_name(policy.dtype)
    assert recipe is not None
    if module is None:
        result = f"{_FP8} or {half}"
        sizes = f"multiples of {MULTIPLE}, min_width {recipe.min_width}, min_size {recipe.min_size}"
        return replace(row, on_float32=result, on_half=result, reason=f"{row.reason}; FP8 by its sizes: {sizes}")
    outputs, inputs = module.get_parameter("weight").shape
    why = "kept in half" if is_kept else recipe.why_half(None, inputs, outputs)
    if why is not None:
        return replace(row, reason=f"{row.reason}; not FP8: {why}", why_half=why)
    result = f"{_FP8} ({half} result)"
    reason = f"{row.reason}; FP8 for {recipe.least_rows(inputs, outputs)} rows or more, a multiple of {MULTIPLE}"
    return replace(row, on_float32=result, on_half=result, reason=reason, why_half="")


def _result(decision: Decision) -> str:
    if decision.dtype is None or decision.compute is None:
        return "as it is"
    inside = "" if decision.compute is decision.dtype else f" (computed in {dtype_name(decision.compute)})"
    return dtype_name(decision.dtype) + inside


def _module_rows(model: nn.Module, policy: Policy) -> Iterator[ExplanationRow]:
    excluded = {id(m) for module in model.modules() if is_excluded(module) for m in module.modules()}
    kept = {id(m) for module in model.modules() if stays_in_half(module) for m in module.modules()}
    for path, module in model.named_modules():
        if any(True for _ in module.children()):
            continue
        op = operator_of(module)
        if id(module) in excluded:
            why = "excluded layer"
            could_be_fp8 = op is not None and has_fp8(policy, op)
            yield ExplanationRow(
                path, op or type(module).__name__, "float32", "float32", why, why if could_be_fp8 else None
            )
        elif op is not None:
            yield _row(path, op, policy, module, id(module) in kept)
        else:
            in_half = "; not FP8: kept in half" if policy.fp8 is not None and id(module) in kept else ""
            reason = f"own code: each operator in it decides for itself{in_half}"
            yield ExplanationRow(path, type(module).__name__, "?", "?", reason)


def operator_of(module: nn.Module) -> str | None:
    """Return the operator that the forward of a leaf module calls, None if it has its own code.

    >>> operator_of(nn.Conv2d(1, 1, 1))
    'conv2d'
    """
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.modules"):
            return _MODULE_OPS.get(kind.__name__) or _by_suffix(kind.__name__)
        if "forward" in vars(kind):
            return None
    return None


def _by_suffix(class_name: str) -> str | None:
    base = class_name.rstrip("123d") if class_name[-2:] in ("1d", "2d", "3d") else class_name
    if base not in _SUFFIXED:
        return None
    snake = _SNAKE.get(base, base.lower())
    return snake if snake in _WITHOUT_DIMS else snake + class_name[len(base) :]
