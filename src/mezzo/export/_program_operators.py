"""The operators that an untrusted program may use, and checks of their arguments.

aten has 3,700 operators. Some write to an address that the file chooses
(`_sparse_coo_tensor_unsafe`), read beyond their input (`_native_batch_norm_legit`), change the
state of the process (`set_grad_enabled`, `manual_seed`) or return uninitialised memory
(`empty_strided`).

Therefore only the operators listed here are allowed: the core set of torch 2.13, and the operators
that `torch.export` writes for the layers of `torch.nn`, the functions of `torch` and the nine
networks. Operators that a wrong argument makes unsafe are excluded. `_program_rewrites` runs before
these checks and inserts run-time checks before some operators.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

#: `name` means `name.default`; other overloads follow the dot.
_PURE = """
__and__.Scalar/Tensor __iand__.Tensor __ior__.Tensor __lshift__.Scalar/Tensor __or__.Scalar/Tensor
__rshift__.Scalar/Tensor __xor__.Scalar/Tensor _adaptive_avg_pool2d _adaptive_avg_pool3d
_assert_async.default/msg _assert_scalar _assert_tensor_metadata _log_softmax _softmax _to_copy _unique2
_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec
_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec abs absolute acos acosh adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
add.Scalar/Tensor addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid_generator alias
all.default/dim/dims alpha_dropout amax amin aminmax angle any.default/dim/dims arange.default/start/start_step
arccos arcsin arctan arctan2 argmax argmin argsort.default/stable asin asinh atan atan2 atanh atleast_1d
atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bernoulli.default/p bilinear
binary_cross_entropy binary_cross_entropy_with_logits bitwise_and.Scalar/Scalar_Tensor/Tensor
bitwise_left_shift.Tensor/Tensor_Scalar bitwise_not bitwise_or.Scalar/Tensor
bitwise_right_shift.Tensor/Tensor_Scalar bitwise_xor.Scalar/Tensor block_diag bmm broadcast_tensors
bucketize.Tensor cartesian_prod cat cdist ceil celu chain_matmul channel_shuffle chunk clamp.Tensor/default
clamp_max clamp_min clip clone col2im column_stack complex concat constant_pad_nd contiguous
conv1d.default/padding conv2d.default/padding conv3d.default/padding conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution copysign.Tensor cos cosh cosine_embedding_loss cosine_similarity
count_nonzero cross_entropy_loss cummax cummin cumprod cumsum cumulative_trapezoid.dx deg2rad detach diag
diag_embed diagonal diff digamma div.Scalar/Scalar_mode/Tensor/Tensor_mode divide.Tensor dot dropout dstack
einsum elu embedding eq.Scalar/Tensor erf erfc erfinv exp exp2 expand expand_as expm1 eye
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fft_fft
fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn
fft_rfft fft_rfft2 fft_rfftn fill.Scalar fix flatten.using_ints flip fliplr flipud floor floor_divide fmax fmin
fmod.Scalar/Tensor frac frobenius_norm.dim full full_like gather ge.Scalar/Tensor gelu ger glu
greater.Scalar/Tensor greater_equal.Tensor grid_sampler grid_sampler_2d group_norm gru.input gru_cell
gt.Scalar/Tensor hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss hsplit.int hstack
huber_loss hypot i0 igamma im2col imag index.Tensor index_add index_copy index_fill.int_Scalar/int_Tensor
index_put index_select inner instance_norm is_nonzero isclose isfinite isin.Tensor_Tensor isinf isnan isneginf
isposinf isreal item kl_div kron kthvalue l1_loss layer_norm ldexp.Tensor le.Scalar/Tensor leaky_relu
lerp.Scalar/Tensor less.Scalar/Tensor less_equal.Tensor lgamma lift_fresh lift_fresh_copy linalg_cholesky
linalg_cross linalg_det linalg_inv linalg_matrix_norm.str_ord linalg_multi_dot linalg_norm linalg_solve
linalg_vector_norm linear linspace log log10 log1p log2 log_sigmoid log_softmax.int logaddexp logaddexp2
logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lstm.input lstm_cell lt.Scalar/Tensor mH mT
margin_ranking_loss masked_fill.Scalar/Tensor masked_scatter masked_select matmul matrix_H max.default/dim/other
max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d maximum
mean.default/dim median.default/dim meshgrid.indexing min.default/dim/other minimum mish mm mode moveaxis.int
movedim.int/intlist mse_loss msort mul.Scalar/Tensor multiply.Tensor mv nan_to_num nanmean nanmedian nansum
narrow native_group_norm native_layer_norm ne.Scalar/Tensor neg negative new_full new_ones new_zeros nextafter
nll_loss nll_loss2d nll_loss_nd nonzero norm.Scalar/ScalarOpt_dim not_equal.Tensor numpy_T one_hot ones
ones_like outer pad pairwise_distance permute pixel_shuffle pixel_unshuffle poisson_nll_loss polar polygamma
positive pow.Scalar/Tensor_Scalar/Tensor_Tensor prelu prod.default/dim_int quantile.scalar rad2deg rand
rand_like randint.low randn randn_like ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d
relu remainder.Scalar/Tensor repeat repeat_interleave.self_int replication_pad1d replication_pad2d
replication_pad3d reshape reshape_as rms_norm rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell roll
rot90 round.decimals/default row_stack rrelu rsqrt rsub.Scalar/Tensor scalar_tensor scaled_dot_product_attention
scatter.reduce/src/value scatter_add scatter_reduce.two searchsorted.Tensor select.int select_scatter selu sgn
sigmoid sign signbit silu sin sinc sinh slice.Tensor slice_scatter smooth_l1_loss soft_margin_loss softmax.int
softplus softshrink sort.default/stable special_erf special_expit special_expm1 special_i0e special_log1p
special_log_softmax special_logit special_ndtr special_softmax split.Tensor/sizes split_with_sizes sqrt square
squeeze.default/dim/dims stack std.correction/default/dim std_mean.correction/default/dim sub.Scalar/Tensor
subtract.Tensor sum.default/dim_IntList swapaxes swapdims sym_constrain_range sym_constrain_range_for_size
sym_numel sym_size.int t take take_along_dim tan tanh tensor_split.indices/sections/tensor_indices_or_sections
tensordot threshold tile to.device/dtype/dtype_layout/other/prim_Device topk trace transpose.int tril
triplet_margin_loss triu triu_indices true_divide.Tensor trunc type_as unbind.int unflatten.int unfold
unique_consecutive unsqueeze upsample_bicubic2d.default/vec upsample_bilinear2d.default/vec
upsample_linear1d.default/vec upsample_nearest1d.default/vec upsample_nearest2d.default/vec
upsample_nearest3d.default/vec upsample_trilinear3d.default/vec var.correction/default/dim
var_mean.correction/default/dim vdot view view_as view_as_complex view_as_real vsplit.int vstack
where.Scalar/ScalarOther/ScalarSelf/default/self xlogy.Scalar_Other/Tensor zeros zeros_like
"""
#: In place: those that layers with `inplace=True` and assignments give.
_IN_PLACE = """
abs_ add_.Scalar/Tensor addcmul_ bitwise_and_.Tensor bitwise_or_.Tensor ceil_ celu_ clamp_ clamp_max_ clamp_min_
clip_ copy_ cos_ cumsum_ detach_ div_.Scalar/Tensor/Tensor_mode dropout_ elu_ eq_.Tensor erf_ exp_
feature_dropout_ fill_.Scalar/Tensor floor_ floor_divide_.Tensor gelu_ hardsigmoid_ hardswish_ hardtanh_
index_add_ index_copy_ index_fill_.int_Scalar index_put_ leaky_relu_ log_ logical_and_ logical_or_
masked_fill_.Scalar/Tensor mish_ mul_.Scalar/Tensor neg_ pow_.Scalar/Tensor reciprocal_ relu_
remainder_.Scalar/Tensor round_ rrelu_ rsqrt_ scatter_.src/value scatter_add_ scatter_reduce_.two selu_ sigmoid_
silu_ sin_ sqrt_ square_ sub_.Scalar/Tensor tanh_ threshold_ zero_
"""


def _expanded(text: str) -> Iterator[str]:
    for entry in text.split():
        name, _, overloads = entry.partition(".")
        for overload in (overloads or "default").split("/"):
            yield f"{name}.{overload}"


OPERATORS = frozenset(_expanded(_PURE + _IN_PLACE))
"""Allowed operators as name and overload, for example 'conv2d.default'."""

#: Arithmetic on sizes. Shifts, and operators of Python that call functions, are excluded.
_ON_SIZES = re.compile(
    r"torch\.sym_(int|float|ite|max|min|sqrt|not|sum)|math\.(trunc|floor|ceil|sqrt)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
)
_ATEN = "torch.ops.aten."
_ADVICE = "write the network with other operators, or use its ONNX file; torch.export.load loads a file that you trust"

MAX_ELEMENTS = 1 << 28
"""Limit for tensors whose size is a constant of the program; 1 GiB of float32.

Sizes that depend on the input are not limited.
"""
DEVICES = ("cpu", "cuda")
"""Tensors of other devices have no data here: torch would read arbitrary memory."""
_MOST_DIVISOR = 1 << 31
_MOST_SCALE = 4096  # largest scale of an upsampling
_MOST_FACTORS = 64  # in a product of sizes: more could make numbers with millions of digits
_MAKES = frozenset(
    "zeros ones full eye rand randn randint arange linspace new_zeros new_ones new_full repeat tile repeat_interleave one_hot"
    " tensor_split triu_indices tril_indices affine_grid_generator expand diag_embed pad constant_pad_nd channel_shuffle"
    " adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d"
    " adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
    " upsample_bicubic2d upsample_trilinear3d col2im max_unpool2d pixel_shuffle chunk unflatten".split()
)
_VALUES = frozenset({"fill_value", "value", "start", "end", "low", "high"})  # arguments of _MAKES that are not sizes
_STRIDED = 7  # in torch's schema: a dense tensor
#: Kinds of arguments that are not tensors, numbers or options.
_FOREIGN = frozenset({"as_operator", "as_graph", "as_custom_obj", "custom_obj", "as_opaque", "as_string_to_argument"})


def problem_with_target(target: object) -> str | None:
    """Return why an operator is refused; None if it is allowed.

    >>> problem_with_target("torch.ops.aten.conv2d.default")
    >>> problem_with_target("torch.ops.aten._print.default").split(";")[0]
    "the operator '_print.default' is not among those that programs may use"
    >>> problem_with_target("os.system").split(";")[0]
    "the operator 'os.system' is not among those that programs may use"
    """
    text = str(target)
    if text.removeprefix(_ATEN) in OPERATORS and text.startswith(_ATEN):
        return None
    if _ON_SIZES.fullmatch(text):
        return None
    return f"the operator {text.removeprefix(_ATEN)[:80]!r} is not among those that programs may use; {_ADVICE}"


def problem_with_nodes(nodes: list[Any]) -> str | None:
    """Return the first problem of a graph: an operator that is not listed, or has unsafe arguments.

    Args:
        nodes: Nodes of the graph, in the JSON of `torch.export`.
    """
    factors: dict[str, int] = {}
    for node in nodes:
        problem = problem_with_target(node["target"]) or _problem_with_arguments(node)
        if problem is None and node["target"].startswith("_operator."):
            problem = _problem_with_product(node, factors)
        if problem is not None:
            return problem
    return None


def _problem_with_arguments(node: Any) -> str | None:
    name = node["target"].removeprefix(_ATEN).partition(".")[0]
    arguments = {entry["name"]: _constant(entry["arg"]) for entry in node["inputs"]}
    if any(len(entry["arg"]) != 1 or not _FOREIGN.isdisjoint(entry["arg"]) for entry in node["inputs"]):
        return f"{name} has an argument that is not a tensor, a number or an option"
    if any(entry["arg"].get("as_layout", _STRIDED) not in (_STRIDED, None) for entry in node["inputs"]):
        return f"{name} asks for a sparse tensor; only dense tensors are allowed"
    if name in _MAKES and _elements(name, arguments) > MAX_ELEMENTS:
        return f"{name} makes a tensor of more than {MAX_ELEMENTS} elements"
    # Dividing the smallest integer by -1 ends the process; only a constant divisor excludes that.
    if name in ("div", "div_", "divide") and arguments.get("rounding_mode") == "trunc" and not _is_divisor(arguments):
        return f"div with rounding_mode 'trunc' needs a number below {_MOST_DIVISOR} and not -1 as divisor; use 'floor'"
    if "upsample" in name and not all(_is_scale(entry["arg"]) for entry in node["inputs"] if "scale" in entry["name"]):
        return f"{name} has a scale outside 1/{_MOST_SCALE} to {_MOST_SCALE}"
    if any(entry["name"] == "device" and not _is_device(entry["arg"]) for entry in node["inputs"]):
        return f"{name} asks for a device other than cpu and cuda"
    if name.startswith("grid_sampler") and not all(
        arguments.get(key, 0) in (0, 1, 2) for key in ("interpolation_mode", "padding_mode")
    ):
        return f"{name} has an unknown mode"
    return None


def _is_divisor(arguments: dict[str, Any]) -> bool:
    """Return whether the divisor is a constant that no integer type converts to 0 or -1."""
    other = arguments.get("other")
    return isinstance(other, int | float) and 1 <= abs(other) < _MOST_DIVISOR and other != -1


def _is_scale(argument: Any) -> bool:
    """Return whether a scale is missing or in range: others make torch read wrong addresses."""
    if argument.get("as_none"):
        return True
    given = _constant(argument)
    return all(
        isinstance(scale, int | float) and 1 / _MOST_SCALE <= scale <= _MOST_SCALE
        for scale in (given if isinstance(given, list) else [given])
    )


def _is_device(argument: Any) -> bool:
    if argument.get("as_none"):
        return True
    return isinstance(argument.get("as_device"), dict) and argument["as_device"].get("type") in DEVICES


def _constant(argument: Any) -> Any:
    """Return the value of a constant argument (number, string, list of numbers), otherwise None."""
    kind: Any
    value: Any
    ((kind, value),) = argument.items() if len(argument) == 1 else ((None, None),)
    if kind in ("as_int", "as_float", "as_string", "as_ints", "as_floats"):
        return value
    if kind == "as_sym_int":
        return value.get("as_int")
    if kind == "as_sym_ints":
        return [item.get("as_int", 1) for item in value]
    return None


def _elements(name: str, arguments: dict[str, Any]) -> float:
    """Return an upper bound of the elements that an operator creates, from its constants."""
    if name == "arange":
        start, end, step = (arguments.get(key) for key in ("start", "end", "step"))
        distance = abs(_number(end) - _number(start))
        return distance / max(abs(_number(step)) or 1, 1e-300)
    largest = 1.0
    for key, value in arguments.items():
        if key in _VALUES:
            continue
        numbers = [abs(_number(item)) for item in value] if isinstance(value, list) else [abs(_number(value))]
        largest = max(largest, math.prod(max(number, 1.0) for number in numbers))
    return largest


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if math.isfinite(value) else 0.0


def _problem_with_product(node: Any, factors: dict[str, int]) -> str | None:
    """Limit the factors of a size: Python integers are unbounded, and repeated squares explode."""
    counts = [_factors(entry["arg"], factors) for entry in node["inputs"]]
    total = max(counts, default=1)
    if node["target"] == "_operator.mul":
        total = sum(counts)
    elif node["target"] == "_operator.pow":
        exponent = _constant(node["inputs"][-1]["arg"])
        if type(exponent) is not int or not 0 <= exponent <= 8:
            return "a size has a power with an exponent outside 0 to 8"
        total = counts[0] * max(exponent, 1)
    if total > _MOST_FACTORS:
        return f"a size is a product of more than {_MOST_FACTORS} factors"
    for output in node["outputs"]:
        factors[_symbol(output) or ""] = total
    return None


def _factors(argument: Any, factors: dict[str, int]) -> int:
    return factors.get(_symbol(argument) or "", 1) if _symbol(argument) else 1


def _symbol(argument: Any) -> str | None:
    """Return the name of a computed size; None for other arguments."""
    for kind in ("as_sym_int", "as_sym_float"):
        if isinstance(argument.get(kind), dict) and isinstance(argument[kind].get("as_name"), str):
            return str(argument[kind]["as_name"])
    return None
