"""The operators that mezzo knows by name, and the variants of their calls.

An *operator* is an aten packet (`aten::sum`, with all its functional overloads). Some packets do two things that the
lists treat differently, such as a full sum and a sum over dims. Such a packet has *variants*; the arguments of a call
tell which one it is. Lists, policies and decisions use variants; the name `sum` means both of its variants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

Classifier = Callable[[Sequence[Any], Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its aten packet, the variants of a call, and what is special about its inputs."""

    name: str
    variants: tuple[str, ...]
    classify: Classifier | None = field(default=None, compare=False)
    overload_variant: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By overload name, for overloads that have only one variant."""

    weights: Literal["decide", "follow", "stay"] = "decide"
    """What the tensors after the first one do. `follow`: the first one decides, all are cast. `stay`: only the first one
    decides and is cast; affine parameters and running statistics keep their dtype."""

    opaque: bool = False
    """A composite whose pieces are listed themselves, or an operator that refuses mixed dtypes. torch's own type
    promotion does not follow the gray rule there, so it needs a kernel of mezzo at every level."""


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _by_dim(name: str, position: int) -> Classifier:
    """Distinguish a full reduction (no dim, or an empty list) from one over dims."""
    full, over_dims = f"{name}.full", f"{name}.dim"

    def classify(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        dim = _argument(args, kwargs, position, "dim")
        is_flag = isinstance(dim, bool)  # some overloads have `keepdim` or `unbiased` where others have `dim`
        return full if dim is None or is_flag or dim == [] or dim == () else over_dims

    return classify


def _by_exponent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Distinguish `x ** 2` and `2 ** x` from `x ** y`, the element-wise power of two tensors."""
    both = all(hasattr(_argument(args, kwargs, i, n), "dtype") for i, n in enumerate(("self", "exponent")))
    return "pow.tensor" if both else "pow.scalar"


def _by_groups(name: str) -> Classifier:
    """Recognise a depthwise convolution: one input channel per filter, and as many groups as input channels."""
    plain, depthwise = name, f"{name}.depthwise"

    def classify(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        groups = _argument(args, kwargs, 6, "groups")
        is_depthwise = groups is not None and groups > 1 and args[1].shape[1] == 1
        return depthwise if is_depthwise else plain

    return classify


@lru_cache(maxsize=1024)
def _contracts(equation: str) -> bool:
    """Whether an einsum equation sums over an index that two of its operands share: only then is it a product."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    shared = Counter(label for operand in inputs.split(",") for label in set(operand))  # a point: the ellipsis
    if not arrow:  # the output then has the ellipsis, and every index that appears exactly once
        repeated = Counter(label for label in inputs if label not in ".,")
        output = "".join([".", *(label for label, count in repeated.items() if count == 1)])
    return any(count > 1 and label not in output for label, count in shared.items())


def _by_equation(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Distinguish a contraction from an einsum that transposes, sums one operand or multiplies element-wise."""
    return "einsum" if _contracts(_argument(args, kwargs, 0, "equation")) else "einsum.elementwise"


def _plain(names: str, *, weights: Literal["decide", "follow", "stay"] = "decide", opaque: bool = False) -> list[Op]:
    return [Op(name, (name,), weights=weights, opaque=opaque) for name in names.split()]


def _reductions(names: str, position: int) -> list[Op]:
    return [Op(n, (f"{n}.full", f"{n}.dim"), _by_dim(n, position)) for n in names.split()]


MATRIX_PRODUCTS = _plain(
    "matmul mm bmm addmm addbmm baddbmm mv addmv chain_matmul linalg_multi_dot linear _addmm_activation"
)
EINSUM = Op("einsum", ("einsum", "einsum.elementwise"), _by_equation, opaque=True)
CONVOLUTIONS = [
    *(Op(n, (n, f"{n}.depthwise"), _by_groups(n)) for n in ("conv1d", "conv2d")),
    *_plain("conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution"),
]
ATTENTION = _plain("scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention")
INDEXED_MAX_POOLING = _plain("max_pool1d_with_indices max_pool2d_with_indices adaptive_max_pool1d adaptive_max_pool2d")
FAKE_QUANTISATION = _plain("fake_quantize_per_tensor_affine fake_quantize_per_channel_affine", weights="stay")
RECURRENT = _plain(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell _cudnn_rnn mkldnn_rnn_layer",
    opaque=True,
)

SENSITIVE_POINTWISE = _plain(
    "tan acos asin sinh cosh atanh erfinv exp expm1 log log10 log2 reciprocal rsqrt square softplus"
)
POWER = [
    Op(
        "pow",
        ("pow.scalar", "pow.tensor"),
        _by_exponent,
        overload_variant={"Tensor_Scalar": "pow.scalar", "Scalar": "pow.scalar"},
    )
]
SUMS = _reductions("sum mean prod", 1)
NORMS = [
    *_reductions("norm linalg_vector_norm linalg_norm", 2),
    *_reductions("nuclear_norm", 1),
    *(Op(n, (f"{n}.dim",)) for n in ("linalg_matrix_norm", "frobenius_norm")),
]
OTHER_REDUCTIONS = _reductions("nansum logsumexp var std", 1)
SCANS = _plain("cumprod cumsum")
DISTANCES = [*_plain("dist renorm"), *_plain("cosine_similarity", opaque=True)]
AFFINE_NORMS = _plain(
    "layer_norm native_layer_norm group_norm native_group_norm rms_norm", weights="follow", opaque=True
)
SOFTMAXES = _plain("softmax log_softmax _safe_softmax")
LOSSES = _plain(
    "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd binary_cross_entropy binary_cross_entropy_with_logits huber_loss "
    "smooth_l1_loss mse_loss l1_loss kl_div poisson_nll_loss ctc_loss cosine_embedding_loss hinge_embedding_loss "
    "margin_ranking_loss multi_margin_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss",
    opaque=True,
)
UPSAMPLING = _plain(
    "upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
#: Coordinates are float32: half ones miss pixels of large images. The image decides the dtype of what is sampled from it.
GRIDS = _plain("affine_grid_generator")
GRID_SAMPLING = _plain("grid_sampler", weights="follow", opaque=True)
EMBEDDINGS = _plain("embedding", opaque=True)
SCATTERING = _plain("scatter index_copy scatter_add", opaque=True)

GRAY = [
    *_plain("add sub rsub mul div maximum minimum remainder fmod atan2 where addcmul addcdiv"),
    *_plain(
        "relu leaky_relu elu selu celu gelu silu mish sigmoid tanh hardswish hardsigmoid hardtanh relu6 log_sigmoid"
    ),
    *_plain("softshrink hardshrink threshold rrelu glu dropout abs neg sqrt sin cos erf log1p clamp round floor ceil"),
    *_plain("avg_pool1d avg_pool2d avg_pool3d amax amin cat stack gather index_select masked_fill"),
    *_plain("constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d"),
    *_plain(
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d max_pool2d max_pool3d", opaque=True
    ),
    *_plain("prelu lerp", opaque=True),
    *_plain("embedding_bag index_add scatter_reduce masked_scatter linalg_cross", opaque=True),
    *_plain("tensordot dot vdot addr bilinear cross index_put linalg_vecdot", opaque=True),
    *_plain("batch_norm", weights="stay"),
    *_plain("instance_norm", weights="follow", opaque=True),
]

# Operators without half kernels on CPU or CUDA (decompositions, solvers, transforms): always float32.
NO_HALF_KERNEL = _plain(
    "linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv "
    "linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv "
    "linalg_tensorsolve linalg_householder_product linalg_det linalg_slogdet linalg_pinv cholesky cholesky_inverse "
    "cholesky_solve inverse pinverse qr svd lu_solve geqrf orgqr ormqr triangular_solve quantile nanquantile stft "
    "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft "
    "fft_rfft2 fft_rfftn cdist pdist matrix_exp linalg_matrix_exp",
    opaque=True,
)

#: Every operator by aten name.
OPS: dict[str, Op] = {
    op.name: op
    for group in (
        MATRIX_PRODUCTS, (EINSUM,), CONVOLUTIONS, ATTENTION, INDEXED_MAX_POOLING, FAKE_QUANTISATION, RECURRENT,
        SENSITIVE_POINTWISE, POWER, SUMS, NORMS, OTHER_REDUCTIONS, SCANS, DISTANCES, AFFINE_NORMS, SOFTMAXES, LOSSES,
        UPSAMPLING, GRIDS, GRID_SAMPLING, EMBEDDINGS, SCATTERING, GRAY, NO_HALF_KERNEL,
    )
    for op in group
}  # fmt: skip


def variants_of(ops: Iterable[Op]) -> frozenset[str]:
    """Return the variants of all the given operators.

    >>> sorted(variants_of(POWER))
    ['pow.scalar', 'pow.tensor']
    """
    return frozenset(variant for op in ops for variant in op.variants)


#: Composites whose result is float32 if these pieces are: they need no kernel if torch's kernels make the pieces float32.
PIECES: dict[str, tuple[str, ...]] = {
    "cross_entropy_loss": ("log_softmax", "nll_loss", "nll_loss2d"),
    "nll_loss_nd": ("nll_loss", "nll_loss2d"),
    "square": ("pow.scalar",),
}

#: Operators that take a Python number in place of a tensor; torch passes it as a 0-dim CPU tensor.
WITH_NUMBERS = frozenset(
    "add sub rsub mul div remainder fmod pow where maximum minimum atan2 addcmul addcdiv lerp".split()
)

#: Every variant, and the operator it belongs to.
VARIANTS: dict[str, Op] = {variant: op for op in OPS.values() for variant in op.variants}

#: Arithmetic that Tensor Cores do: on a CPU without half units it is float32, with half inputs and outputs.
HEAVY = variants_of([*MATRIX_PRODUCTS, *CONVOLUTIONS, *ATTENTION, *RECURRENT]) | {"einsum"}
WITHOUT_HALF_KERNEL = variants_of(NO_HALF_KERNEL) | {"ctc_loss", "nuclear_norm.full", "nuclear_norm.dim"}
#: CUDA has a half kernel, the CPU has none: there it is float32, with half inputs and outputs.
NO_CPU_HALF_KERNEL = frozenset(
    "avg_pool3d multi_margin_loss multilabel_margin_loss _upsample_bilinear2d_aa _upsample_bicubic2d_aa".split()
)
