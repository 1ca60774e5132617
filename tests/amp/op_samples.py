"""One small call of every operator variant mezzo knows: `SAMPLES[variant](t)`, where `t(*shape)` makes a float tensor.

The tensors that decide come first and in the operator's own order. Values lie in (0.1, 0.9), where every function here is
defined. Operators whose call needs a GPU or another library's state are in NOT_CALLABLE_HERE with the reason.
Run them under `torch.device(...)` for another device.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Maker = Callable[..., Tensor]
aten = torch.ops.aten


def _index() -> Tensor:
    return torch.tensor([1, 0])


def _labels() -> Tensor:
    return torch.tensor([0, 2, 1])


def _spd(t: Maker) -> Tensor:
    """Return a well-conditioned symmetric matrix, so that every factorisation exists."""
    x = t(4, 4)
    return (torch.eye(4, dtype=torch.float32) * 4 + x.detach().float() * 0 + 0.125).to(x.dtype)  # exact in half


def _rnn(kind: str, gates: int) -> Callable[[Maker], Any]:
    def call(t: Maker) -> Any:
        x, h = t(2, 3, 4), t(1, 2, 4)
        weights = [t(4 * gates, 4), t(4 * gates, 4), t(4 * gates), t(4 * gates)]
        state = [h, t(1, 2, 4)] if kind == "lstm" else h
        return getattr(aten, kind).input(x, state, weights, True, 1, 0.0, True, False, True)[0]

    return call


def _cell(kind: str, gates: int) -> Callable[[Maker], Any]:
    def call(t: Maker) -> Any:
        x, h = t(2, 4), t(2, 4)
        weights = (t(4 * gates, 4), t(4 * gates, 4), t(4 * gates), t(4 * gates))
        return getattr(torch, kind)(x, (h, t(2, 4)) if kind == "lstm_cell" else h, *weights)

    return call


def _unary(name: str) -> Callable[[Maker], Any]:
    return lambda t: getattr(aten, name)(t(3, 4))


def _binary(name: str) -> Callable[[Maker], Any]:
    return lambda t: getattr(aten, name)(t(3, 4), t(3, 4))


SAMPLES: dict[str, Callable[[Maker], Any]] = {
    # white: matrix products
    "matmul": lambda t: torch.matmul(t(2, 3, 4), t(4, 5)),
    "mm": lambda t: torch.mm(t(3, 4), t(4, 5)),
    "bmm": lambda t: torch.bmm(t(2, 3, 4), t(2, 4, 5)),
    "addmm": lambda t: torch.addmm(t(5), t(3, 4), t(4, 5)),
    "addbmm": lambda t: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda t: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "mv": lambda t: torch.mv(t(3, 4), t(4)),
    "addmv": lambda t: torch.addmv(t(3), t(3, 4), t(4)),
    "chain_matmul": lambda t: aten.chain_matmul([t(3, 4), t(4, 5), t(5, 2)]),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t(3, 4), t(4, 5), t(5, 2)]),
    "linear": lambda t: F.linear(t(3, 4), t(5, 4), t(5)),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(3, 4), t(4, 5)),
    "einsum.elementwise": lambda t: torch.einsum("ij,ij->ij", t(3, 4), t(3, 4)),
    "tensordot": lambda t: torch.tensordot(t(3, 4), t(4, 5), dims=1),
    "_addmm_activation": lambda t: torch._addmm_activation(t(5), t(3, 4), t(4, 5)),
    # white: convolutions
    "conv1d": lambda t: F.conv1d(t(1, 2, 8), t(4, 2, 3)),
    "conv1d.depthwise": lambda t: F.conv1d(t(1, 4, 8), t(4, 1, 3), groups=4),
    "conv2d": lambda t: F.conv2d(t(1, 2, 8, 8), t(4, 2, 3, 3), t(4)),
    "conv2d.depthwise": lambda t: F.conv2d(t(1, 4, 8, 8), t(4, 1, 3, 3), groups=4),
    "conv3d": lambda t: F.conv3d(t(1, 2, 4, 4, 4), t(4, 2, 3, 3, 3)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 2, 8), t(2, 4, 3)),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t(1, 2, 8, 8), t(2, 4, 3, 3)),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t(1, 2, 4, 4, 4), t(2, 4, 3, 3, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(8, 1, 2), t(3, 2, 4), t(4)),
    "convolution": lambda t: aten.convolution(t(1, 2, 8, 8), t(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "_convolution": lambda t: aten._convolution(
        t(1, 2, 8, 8), t(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False
    ),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    # white: pooling that returns indices, fake quantisation
    "max_pool1d_with_indices": lambda t: F.max_pool1d(t(1, 2, 8), 2, return_indices=True)[0],
    "max_pool2d_with_indices": lambda t: F.max_pool2d(t(1, 2, 8, 8), 2, return_indices=True)[0],
    "adaptive_max_pool1d": lambda t: F.adaptive_max_pool1d(t(1, 2, 8), 2),
    "adaptive_max_pool2d": lambda t: F.adaptive_max_pool2d(t(1, 2, 8, 8), 2),
    "fake_quantize_per_tensor_affine": lambda t: torch.fake_quantize_per_tensor_affine(t(3, 4), 0.1, 0, 0, 255),
    "fake_quantize_per_channel_affine": lambda t: torch.fake_quantize_per_channel_affine(
        t(3, 4), torch.full((3,), 0.1), torch.zeros(3), 0, 0, 255
    ),
    # recurrent
    "lstm": _rnn("lstm", 4),
    "gru": _rnn("gru", 3),
    "rnn_tanh": _rnn("rnn_tanh", 1),
    "rnn_relu": _rnn("rnn_relu", 1),
    "lstm_cell": _cell("lstm_cell", 4),
    "gru_cell": _cell("gru_cell", 3),
    "rnn_tanh_cell": _cell("rnn_tanh_cell", 1),
    "rnn_relu_cell": _cell("rnn_relu_cell", 1),
    # black
    **{
        name: _unary(name)
        for name in (
            "tan acos asin sinh cosh atanh erfinv exp expm1 log log10 log2 reciprocal rsqrt square softplus"
        ).split()
    },
    "pow.scalar": lambda t: t(3, 4) ** 2.5,
    "pow.tensor": lambda t: t(3, 4) ** t(3, 4),
    "sum.full": lambda t: t(3, 4).sum(),
    "sum.dim": lambda t: t(3, 4).sum(1),
    "mean.full": lambda t: t(3, 4).mean(),
    "mean.dim": lambda t: t(3, 4).mean(dim=1, keepdim=True),
    "prod.full": lambda t: t(3, 4).prod(),
    "prod.dim": lambda t: t(3, 4).prod(1),
    "nansum.full": lambda t: torch.nansum(t(3, 4)),
    "nansum.dim": lambda t: torch.nansum(t(3, 4), dim=1),
    "logsumexp.dim": lambda t: torch.logsumexp(t(3, 4), 1),
    "var.full": lambda t: torch.var(t(3, 4)),
    "var.dim": lambda t: torch.var(t(3, 4), dim=1),
    "std.full": lambda t: torch.std(t(3, 4)),
    "std.dim": lambda t: torch.std(t(3, 4), dim=1),
    "norm.full": lambda t: aten.norm.Scalar(t(3, 4), 2),
    "norm.dim": lambda t: aten.norm.ScalarOpt_dim(t(3, 4), 2, [1]),
    "linalg_vector_norm.full": lambda t: torch.linalg.vector_norm(t(3, 4)),
    "linalg_vector_norm.dim": lambda t: torch.linalg.vector_norm(t(3, 4), dim=1),
    "linalg_norm.full": lambda t: torch.linalg.norm(t(3, 4)),
    "linalg_norm.dim": lambda t: torch.linalg.norm(t(3, 4), dim=1),
    "linalg_matrix_norm.dim": lambda t: torch.linalg.matrix_norm(t(3, 4)),
    "frobenius_norm.dim": lambda t: aten.frobenius_norm.dim(t(3, 4), [1]),
    "nuclear_norm.full": lambda t: aten.nuclear_norm(t(3, 4)),
    "nuclear_norm.dim": lambda t: aten.nuclear_norm.dim(t(3, 4), [0, 1]),
    "cumprod": lambda t: torch.cumprod(t(3, 4), 1),
    "cumsum": lambda t: torch.cumsum(t(3, 4), 1),
    "dist": _binary("dist"),
    "renorm": lambda t: torch.renorm(t(3, 4), 2, 0, 1.0),
    "layer_norm": lambda t: F.layer_norm(t(3, 4), (4,), t(4), t(4)),
    "native_layer_norm": lambda t: torch.native_layer_norm(t(3, 4), (4,), t(4), t(4), 1e-5)[0],
    "group_norm": lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "native_group_norm": lambda t: torch.native_group_norm(t(2, 4, 3), t(4), t(4), 2, 4, 3, 2, 1e-5)[0],
    "softmax": lambda t: F.softmax(t(3, 4), 1),
    "log_softmax": lambda t: F.log_softmax(t(3, 4), 1),
    # losses
    "cross_entropy_loss": lambda t: F.cross_entropy(t(3, 4), _labels(), label_smoothing=0.1),
    "nll_loss": lambda t: aten.nll_loss(t(3, 4), _labels()),
    "nll_loss2d": lambda t: aten.nll_loss2d(t(1, 3, 1, 3), _labels().view(1, 1, 3)),
    "nll_loss_nd": lambda t: F.nll_loss(t(3, 4), _labels()),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t(3, 4), t(3, 4)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(3, 4), t(3, 4)),
    "huber_loss": lambda t: F.huber_loss(t(3, 4), t(3, 4)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(3, 4), t(3, 4)),
    "mse_loss": lambda t: F.mse_loss(t(3, 4), t(3, 4)),
    "l1_loss": lambda t: F.l1_loss(t(3, 4), t(3, 4)),
    "kl_div": lambda t: F.kl_div(t(3, 4), t(3, 4), reduction="sum"),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(3, 4), t(3, 4)),
    "ctc_loss": lambda t: F.ctc_loss(t(6, 1, 4), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(3, 4), t(3, 4), torch.ones(3, dtype=torch.long)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(3, 4), torch.ones(3, 4, dtype=torch.long)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(3), t(3), torch.ones(3, dtype=torch.long)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(3, 4), _labels()),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(3, 4), torch.zeros(3, 4, dtype=torch.long)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(3, 4), t(3, 4).detach()),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(3, 4), t(3, 4), t(3, 4)),
    # fp32 inside
    "upsample_linear1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2.0, mode="linear"),
    "upsample_nearest1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2.0),
    "upsample_nearest2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2.0),
    "upsample_nearest3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2.0),
    "upsample_bilinear2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2.0, mode="bilinear"),
    "upsample_bicubic2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2.0, mode="bicubic"),
    "upsample_trilinear3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2.0, mode="trilinear"),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2.0, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2.0, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2.0, mode="nearest-exact"),
    "_upsample_bilinear2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), size=3, mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), size=3, mode="bicubic", antialias=True),
    # embedding, scatter
    "affine_grid_generator": lambda t: F.affine_grid(t(1, 2, 3), [1, 1, 4, 4], align_corners=False),
    "_safe_softmax": lambda t: aten._safe_softmax(t(3, 4), 1),
    "embedding": lambda t: F.embedding(_index(), t(3, 4)),
    "embedding_bag": lambda t: F.embedding_bag(_index().view(1, 2), t(3, 4)),
    "scatter": lambda t: torch.scatter(t(3, 4), 0, torch.zeros(1, 4, dtype=torch.long), t(1, 4)),
    "index_copy": lambda t: torch.index_copy(t(3, 4), 0, _index(), t(2, 4)),
    "scatter_add": lambda t: torch.scatter_add(t(3, 4), 0, torch.zeros(1, 4, dtype=torch.long), t(1, 4)),
    "scatter_reduce": lambda t: torch.scatter_reduce(t(3, 4), 0, torch.zeros(1, 4, dtype=torch.long), t(1, 4), "sum"),
    # gray
    **{n: _binary(n) for n in ["add", "sub", "rsub", "mul", "div", "maximum", "minimum", "remainder", "fmod", "atan2"]},
    **{
        n: _unary(n)
        for n in (
            "relu leaky_relu elu selu celu gelu silu mish sigmoid tanh hardswish hardsigmoid hardtanh relu6 log_sigmoid "
            "softshrink hardshrink abs neg sqrt sin cos erf log1p round floor ceil rrelu glu amax amin"
        ).split()
    },
    "threshold": lambda t: F.threshold(t(3, 4), 0.1, 0.0),
    "prelu": lambda t: F.prelu(t(3, 4), t(4)),
    "dropout": lambda t: F.dropout(t(3, 4), 0.5),
    "clamp": lambda t: torch.clamp(t(3, 4), 0.2, 0.5),
    "where": lambda t: torch.where(torch.ones(3, 4, dtype=torch.bool), t(3, 4), t(3, 4)),
    "lerp": lambda t: torch.lerp(t(3, 4), t(3, 4), 0.5),
    "addcmul": lambda t: torch.addcmul(t(3, 4), t(3, 4), t(3, 4)),
    "addcdiv": lambda t: torch.addcdiv(t(3, 4), t(3, 4), t(3, 4)),
    "avg_pool1d": lambda t: F.avg_pool1d(t(1, 2, 8), 2),
    "avg_pool2d": lambda t: F.avg_pool2d(t(1, 2, 8, 8), 2),
    "avg_pool3d": lambda t: F.avg_pool3d(t(1, 2, 4, 4, 4), 2),
    "adaptive_avg_pool1d": lambda t: F.adaptive_avg_pool1d(t(1, 2, 8), 1),
    "adaptive_avg_pool2d": lambda t: F.adaptive_avg_pool2d(t(1, 2, 8, 8), 1),
    "adaptive_avg_pool3d": lambda t: F.adaptive_avg_pool3d(t(1, 2, 4, 4, 4), 1),
    "max_pool1d": lambda t: F.max_pool1d(t(1, 2, 8), 2),
    "max_pool2d": lambda t: F.max_pool2d(t(1, 2, 8, 8), 2),
    "max_pool3d": lambda t: F.max_pool3d(t(1, 2, 4, 4, 4), 2),
    "batch_norm": lambda t: F.batch_norm(t(3, 4), torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4), True),
    "instance_norm": lambda t: F.instance_norm(t(2, 3, 8), None, None, t(3), t(3)),
    "rms_norm": lambda t: F.rms_norm(t(3, 4), (4,), t(4)),
    "cosine_similarity": lambda t: F.cosine_similarity(t(3, 4), t(3, 4)),
    "cdist": lambda t: torch.cdist(t(3, 4), t(2, 4)),
    "pdist": lambda t: F.pdist(t(3, 4)),
    "cat": lambda t: torch.cat([t(3, 4), t(3, 4)]),
    "stack": lambda t: torch.stack([t(3, 4), t(3, 4)]),
    "dot": lambda t: torch.dot(t(4), t(4)),
    "vdot": lambda t: torch.vdot(t(4), t(4)),
    "addr": lambda t: torch.addr(t(3, 4), t(3), t(4)),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t(3, 4), t(3, 4)),
    "bilinear": lambda t: F.bilinear(t(3, 4), t(3, 5), t(2, 4, 5)),
    "cross": lambda t: torch.cross(t(2, 3), t(2, 3), dim=1),
    "linalg_cross": lambda t: torch.linalg.cross(t(2, 3), t(2, 3)),
    "masked_scatter": lambda t: torch.masked_scatter(t(3, 4), torch.ones(3, 4, dtype=torch.bool), t(3, 4)),
    "matrix_exp": lambda t: torch.matrix_exp(t(3, 3)),
    "linalg_matrix_exp": lambda t: aten.linalg_matrix_exp(t(3, 3)),
    "grid_sampler": lambda t: F.grid_sample(t(1, 2, 4, 4), t(1, 3, 3, 2), align_corners=False),
    "index_put": lambda t: torch.index_put(t(3, 4), (_index(),), t(2, 4)),
    "index_add": lambda t: torch.index_add(t(3, 4), 0, _index(), t(2, 4)),
    "masked_fill": lambda t: torch.masked_fill(t(3, 4), torch.ones(3, 4, dtype=torch.bool), 0.5),
    "gather": lambda t: torch.gather(t(3, 4), 0, torch.zeros(1, 4, dtype=torch.long)),
    "index_select": lambda t: torch.index_select(t(3, 4), 0, _index()),
    "constant_pad_nd": lambda t: F.pad(t(3, 4), (1, 1)),
    "reflection_pad1d": lambda t: F.pad(t(1, 2, 4), (1, 1), mode="reflect"),
    "reflection_pad2d": lambda t: F.pad(t(1, 2, 4, 4), (1, 1, 1, 1), mode="reflect"),
    "replication_pad1d": lambda t: F.pad(t(1, 2, 4), (1, 1), mode="replicate"),
    "replication_pad2d": lambda t: F.pad(t(1, 2, 4, 4), (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d": lambda t: F.pad(t(1, 2, 4, 4, 4), (1,) * 6, mode="replicate"),
    # no half kernel
    "linalg_cholesky": lambda t: torch.linalg.cholesky(_spd(t)),
    "linalg_cholesky_ex": lambda t: torch.linalg.cholesky_ex(_spd(t))[0],
    "linalg_cond": lambda t: torch.linalg.cond(_spd(t)),
    "linalg_eigh": lambda t: torch.linalg.eigh(_spd(t))[0],
    "linalg_eigvalsh": lambda t: torch.linalg.eigvalsh(_spd(t)),
    "linalg_inv": lambda t: torch.linalg.inv(_spd(t)),
    "linalg_inv_ex": lambda t: torch.linalg.inv_ex(_spd(t))[0],
    "linalg_lstsq": lambda t: torch.linalg.lstsq(_spd(t), _spd(t))[0],
    "linalg_qr": lambda t: torch.linalg.qr(_spd(t))[0],
    "linalg_solve": lambda t: torch.linalg.solve(_spd(t), t(4)),
    "linalg_svd": lambda t: torch.linalg.svd(_spd(t))[0],
    "linalg_svdvals": lambda t: torch.linalg.svdvals(_spd(t)),
    "linalg_tensorinv": lambda t: torch.linalg.tensorinv(_spd(t), 1),
    "linalg_tensorsolve": lambda t: torch.linalg.tensorsolve(_spd(t), t(4)),
    "linalg_householder_product": lambda t: torch.linalg.householder_product(t(4, 3), t(3)),
    "linalg_det": lambda t: torch.linalg.det(_spd(t)),
    "linalg_slogdet": lambda t: torch.linalg.slogdet(_spd(t))[1],
    "linalg_pinv": lambda t: torch.linalg.pinv(_spd(t)),
    "cholesky": lambda t: torch.linalg.cholesky(_spd(t)),
    "cholesky_inverse": lambda t: torch.cholesky_inverse(_spd(t)),
    "cholesky_solve": lambda t: torch.cholesky_solve(t(4, 1), _spd(t)),
    "inverse": lambda t: torch.inverse(_spd(t)),
    "pinverse": lambda t: torch.pinverse(_spd(t)),
    "geqrf": lambda t: torch.geqrf(_spd(t))[0],
    "orgqr": lambda t: torch.orgqr(t(4, 3), t(3)),
    "ormqr": lambda t: torch.ormqr(t(4, 3), t(3), t(4, 2)),
    "quantile": lambda t: torch.quantile(t(3, 4), 0.5),
    "nanquantile": lambda t: torch.nanquantile(t(3, 4), 0.5),
    "fft_irfft": lambda t: torch.fft.rfft(t(8)).abs(),
    "fft_rfft": lambda t: torch.fft.rfft(t(8)).abs(),
    "fft_rfft2": lambda t: torch.fft.rfft2(t(4, 8)).abs(),
    "fft_rfftn": lambda t: torch.fft.rfftn(t(4, 8)).abs(),
    "fft_fft": lambda t: torch.fft.fft(t(8)).abs(),
    "fft_fft2": lambda t: torch.fft.fft2(t(4, 8)).abs(),
    "fft_fftn": lambda t: torch.fft.fftn(t(4, 8)).abs(),
    "fft_ifft": lambda t: torch.fft.ifft(t(8)).abs(),
    "fft_ifft2": lambda t: torch.fft.ifft2(t(4, 8)).abs(),
    "fft_ifftn": lambda t: torch.fft.ifftn(t(4, 8)).abs(),
    "fft_hfft": lambda t: torch.fft.hfft(t(8)),
    "fft_ihfft": lambda t: torch.fft.ihfft(t(8)).abs(),
    "stft": lambda t: torch.stft(t(64), 16, window=torch.ones(16), center=False, return_complex=True).abs(),
}  # fmt: skip

#: Variants without a sample, and why.
NOT_CALLABLE_HERE: dict[str, str] = {
    "_scaled_dot_product_flash_attention": "CUDA kernel",
    "_native_multi_head_attention": "inference fast path of nn.MultiheadAttention with its own weight layout",
    "_thnn_fused_lstm_cell": "CUDA kernel",
    "_thnn_fused_gru_cell": "CUDA kernel",
    "_cudnn_rnn": "CUDA kernel",
    "mkldnn_rnn_layer": "needs weights in oneDNN's packed layout",
    "logsumexp.full": "logsumexp always takes dims",
    "linalg_eig": "complex result",
    "linalg_eigvals": "complex result",
    "linalg_matrix_rank": "integer result",
    "qr": "deprecated alias of linalg.qr that warns",
    "svd": "deprecated alias of linalg.svd that warns",
    "triangular_solve": "deprecated alias of linalg.solve_triangular that warns",
    "lu_solve": "deprecated alias of linalg.lu_solve that warns",
    "fft_irfft2": "takes complex input",
    "fft_irfftn": "takes complex input",
}
