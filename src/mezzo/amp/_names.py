"""Names in operator lists, and the operator variants that they mean.

Four spellings are understood: an operator (`softmax`), one of its variants (`sum.dim`), exactly one aten packet
(`aten::matmul`), and names for several operators: groups (`matmul` means every matrix product) and the names of the AMP
documents (`elementwise_add`, `bilinear_interp_v2`). If a torch name and a document's name collide, torch's meaning
holds: `mul` is element-wise, `sum` is the reduction.
"""

import difflib
import warnings
from collections.abc import Iterable
from functools import cache

from mezzo.amp._ops import (
    CONVOLUTIONS,
    FAKE_QUANTISATION,
    LOSSES,
    MATRIX_PRODUCTS,
    NORMS,
    OPS,
    RECURRENT,
    UPSAMPLING,
    VARIANTS,
    variants_of,
)


def _pick(*names: str) -> frozenset[str]:
    return variants_of(OPS[name] for name in names)


#: One name for several operators. `matmul` must cover every entry point of a matrix product.
OPERATOR_GROUPS: dict[str, frozenset[str]] = {
    "matmul": variants_of(MATRIX_PRODUCTS) | _pick("tensordot") | {"einsum"},
    "conv": variants_of(CONVOLUTIONS),
    "conv_transpose": _pick("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "interpolate": variants_of(UPSAMPLING),
    "loss": variants_of(LOSSES),
    "norm": variants_of(NORMS),
    "rnn": variants_of(RECURRENT),
    "layer_norm": _pick("layer_norm", "native_layer_norm"),
    "group_norm": _pick("group_norm", "native_group_norm"),
    "embedding": _pick("embedding", "embedding_bag"),
    "nll_loss": _pick("nll_loss", "nll_loss2d", "nll_loss_nd"),
    "fake_quantize": variants_of(FAKE_QUANTISATION),
    "lstm": _pick("lstm", "lstm_cell", "_thnn_fused_lstm_cell", "_cudnn_rnn", "mkldnn_rnn_layer"),
    "gru": _pick("gru", "gru_cell", "_thnn_fused_gru_cell", "_cudnn_rnn"),
}

#: Names of the documents, and a few of torch's Python API, that are not aten packets: what they mean.
ALIASES: dict[str, tuple[str, ...]] = {
    "matmul_v2": ("matmul",),
    "linear_v2": ("linear",),
    "fused_gemm_epilogue": ("linear",),
    "multi_dot": ("linalg_multi_dot",),
    "depthwise_conv2d": ("conv2d.depthwise",),
    "conv2d_transpose": ("conv_transpose2d",),
    "flash_attn": ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
    "fused_attention": ("scaled_dot_product_attention", "_native_multi_head_attention"),
    "max_pool2d_with_index": ("max_pool1d_with_indices", "max_pool2d_with_indices", "adaptive_max_pool2d"),
    "pool2d": ("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"),
    "fake_quantize_dequantize_abs_max": ("fake_quantize",),
    "fake_quantize_dequantize_moving_average_abs_max": ("fake_quantize",),
    "elementwise_add": ("add",),
    "elementwise_sub": ("sub", "rsub"),
    "elementwise_mul": ("mul",),
    "elementwise_div": ("div",),
    "elementwise_max": ("maximum",),
    "elementwise_min": ("minimum",),
    "elementwise_mod": ("remainder",),
    "elementwise_pow": ("pow.tensor",),
    "scale": ("mul",),
    "brelu": ("hardtanh",),
    "swish": ("silu",),
    "hard_swish": ("hardswish",),
    "hard_sigmoid": ("hardsigmoid",),
    "concat": ("cat",),
    "sync_batch_norm": ("batch_norm",),
    "reduce_sum": ("sum",),
    "reduce_mean": ("mean",),
    "reduce_prod": ("prod",),
    "p_norm": ("norm",),
    "pnorm": ("norm",),
    "vector_norm": ("linalg_vector_norm",),
    "matrix_norm": ("linalg_matrix_norm",),
    "softmin": ("softmax",),
    "_softmax": ("softmax",),  # names of kernels, as operator tables show them
    "_log_softmax": ("log_softmax",),
    "cross_entropy": ("cross_entropy_loss",),
    "cross_entropy2": ("cross_entropy_loss",),
    "softmax_with_cross_entropy": ("cross_entropy_loss",),
    "sigmoid_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "bce_loss": ("binary_cross_entropy",),
    "kldiv_loss": ("kl_div",),
    "linear_interp_v2": ("upsample_linear1d",),
    "nearest_interp_v2": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "bilinear_interp_v2": ("upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    "bicubic_interp_v2": ("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    "trilinear_interp_v2": ("upsample_trilinear3d",),
    "lookup_table": ("embedding",),
    "lookup_table_v2": ("embedding",),
    "grid_sample": ("grid_sampler",),
}

#: Names of the documents without an operator in torch: accepted without effect, with a warning.
WITHOUT_OPERATOR = frozenset(
    "tanh_shrink log_loss hsigmoid_loss margin_cross_entropy c_softmax_with_cross_entropy fused_feedforward "
    "c_softmax_with_multi_label_cross_entropy fused_rotary_position_embedding".split()
)


@cache
def operator_names() -> tuple[str, ...]:
    """Return every name that a list may hold, sorted."""
    return tuple(sorted({*OPS, *VARIANTS, *OPERATOR_GROUPS, *ALIASES, *WITHOUT_OPERATOR}))


@cache
def is_operator_name(name: str) -> bool:
    """Whether a list may hold this name and it has an effect; cheap.

    >>> is_operator_name("linear"), is_operator_name("argsort")
    (True, False)
    """
    base = name.removeprefix("aten::")
    return name in VARIANTS or base in OPS or name in OPERATOR_GROUPS or name in ALIASES


@cache
def resolve_name(name: str) -> frozenset[str]:
    """Return the variants that a name means.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest one.

    >>> sorted(resolve_name("sum"))
    ['sum.dim', 'sum.full']
    >>> sorted(resolve_name("elementwise_add"))
    ['add']
    """
    exact = name.removeprefix("aten::")
    if exact != name and exact in OPS:
        return frozenset(OPS[exact].variants)
    if name in OPERATOR_GROUPS:
        return OPERATOR_GROUPS[name]
    if name in ALIASES:
        return frozenset().union(*(resolve_name(target) for target in ALIASES[name]))
    if name in OPS:
        return frozenset(OPS[name].variants)
    if name in VARIANTS:
        return frozenset({name})
    if name in WITHOUT_OPERATOR:
        return frozenset()
    close = difflib.get_close_matches(name, operator_names(), n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown operator {name!r}; did you mean {close!r}? mezzo.amp.operator_names() lists all")


def resolve_list(names: Iterable[str] | None, argument: str) -> dict[str, frozenset[str]]:
    """Return the variants of each name of a custom list, checked.

    Args:
        names: Any iterable of operator names (a dict gives its keys), or None for an empty list.
        argument: The parameter's name, for messages.
    """
    if names is None:
        return {}
    if isinstance(names, (str, bytes)):
        raise TypeError(
            f"{argument}={names!r}: must be a list or set of operator names, not one string; use [{names!r}]"
        )
    if not isinstance(names, Iterable):
        raise TypeError(f"{argument}={names!r}: must be a list or set of operator names, not {type(names).__name__}")
    resolved = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: {name!r} is {type(name).__name__}; operator names are strings")
        resolved[name] = resolve_name(name)
        if not resolved[name]:
            warnings.warn(f"{argument}: {name!r} has no effect: torch has no such operator", UserWarning, stacklevel=4)
    return resolved


def check_disjoint(white: dict[str, frozenset[str]], black: dict[str, frozenset[str]]) -> None:
    """Raise ValueError if both custom lists hold the same operators, also under two names."""
    for name, variants in white.items():
        for other, other_variants in black.items():
            if name == other or (variants and variants == other_variants):
                both = repr(name) if name == other else f"{name!r} and {other!r} (the same operator)"
                raise ValueError(f"custom_white_list and custom_black_list both hold {both}; keep it in one of them")
