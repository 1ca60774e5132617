"""What torch's own autocast kernels do: mezzo leaves them alone if they already follow a policy.

The dispatcher is asked which operators have a native kernel, because that changes between releases of torch. What such
a kernel does (cast to half, cast to float32, promote) does not change, so it is a table here.
"""

from enum import Enum
from functools import cache

from mezzo._torch.dispatcher import has_kernel


class Native(Enum):
    """What a native autocast kernel does with floating inputs."""

    LOW = "low"
    FP32 = "fp32"
    PROMOTE = "promote"
    NONE = "falls through"
    OTHER = "other"


AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}

_LOW = {
    "cuda": "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention _cudnn_rnn",
    "cpu": "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution bmm mm linalg_vecdot "
    "baddbmm addmm _addmm_activation addbmm linear matmul scaled_dot_product_attention _native_multi_head_attention "
    "mkldnn_rnn_layer prelu",
}
_PROMOTE = {
    "cuda": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "cpu": "stack cat index_copy",
}
_OTHER = {
    "cuda": "binary_cross_entropy",
    "cpu": "",
}  # CUDA: raises an error, with the advice to use the variant with logits


@cache
def _table(device_type: str) -> dict[str, Native]:
    kinds = ((Native.LOW, _LOW), (Native.PROMOTE, _PROMOTE), (Native.OTHER, _OTHER))
    return {name: kind for kind, names in kinds for name in names[device_type].split()}


@cache
def has_native_kernel(qualified_name: str, device_type: str) -> bool:
    """Whether torch registered an autocast kernel for an overload. The first call must come before mezzo installs its own."""
    return has_kernel(qualified_name, AUTOCAST_KEYS[device_type])


@cache
def native_behaviour(op: str, qualified_name: str, device_type: str) -> Native:
    """Return what torch's autocast does with an overload of `op` on a device type."""
    if not has_native_kernel(qualified_name, device_type):
        return Native.NONE
    return _table(device_type).get(op, Native.FP32)
