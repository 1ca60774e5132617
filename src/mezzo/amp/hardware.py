"""What a device can do with half dtypes, and how devices are named.

Two questions with two thresholds (compute capability of an NVIDIA GPU):

* Can it compute in the dtype at all? float16 from 5.3, bfloat16 from 8.0: `is_*_supported`.
* Is AMP worth using there? float16 from 7.0, bfloat16 from 8.0: `warn_if_unsupported`.

ROCm passes both. A CPU always runs AMP: without half units, heavy operators compute in float32 and
only their inputs and outputs are half.
"""

import subprocess
import warnings

import torch

from mezzo._torch.cpu_features import onednn_computes_bfloat16
from mezzo.devices import parse_device
from mezzo.dtypes import dtype_name, parse_half_dtype

Capability = tuple[int, int]

COMPUTE_SINCE: dict[torch.dtype, Capability] = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}
AMP_SINCE: dict[torch.dtype, Capability] = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
TENSOR_CORES_SINCE: Capability = (7, 0)
TF32_SINCE: Capability = (8, 0)

BACKEND_DTYPES: dict[str, tuple[str, ...]] = {"npu": ("float16",), "xpu": ("float16",), "mlu": ("float16",)}
"""Half dtypes of the backends besides CUDA and CPU, from table 1.3 of the AMP guide."""

CPU_HALF_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "fphp", "asimdhp")
"""Flags of /proc/cpuinfo for half arithmetic."""

CPU_HALF_SLOWDOWN = 2.0
"""A CPU computes in half if a product in half takes less than this many times as long as in float32."""

_amp_runs: dict[tuple[int, torch.dtype], bool] = {}


def is_float16_supported(device: str | torch.device | None = None) -> bool:
    """Return whether `device` computes in float16.

    NVIDIA GPUs do from compute capability 5.3. CPUs never count: there mezzo computes in float32.

    Args:
        device: cpu, gpu, gpu:i, cuda, cuda:i, xpu, npu or mlu; None is the default device.

    >>> is_float16_supported("cpu")
    False
    """
    return _is_supported(torch.float16, device)


def is_bfloat16_supported(device: str | torch.device | None = None) -> bool:
    """Return whether `device` computes in bfloat16.

    NVIDIA GPUs do from compute capability 8.0, CPUs with oneDNN and AVX-512 or AMX.

    Args:
        device: As for `is_float16_supported`.
    """
    return _is_supported(torch.bfloat16, device)


def warn_if_unsupported(dtype: str | torch.dtype, device_index: int = 0) -> bool:
    """Return whether AMP is worth using in `dtype` on a GPU; warn if not, once per process, GPU and dtype.

    Returns True without a GPU.
    """
    half = parse_half_dtype(dtype)
    key = (device_index, half)
    if key not in _amp_runs:
        if device_index >= cuda_device_count():
            return True
        _amp_runs[key] = is_rocm() or torch.cuda.get_device_capability(device_index) >= AMP_SINCE[half]
        if not _amp_runs[key]:
            warnings.warn(_too_old(half, device_index), UserWarning, stacklevel=3)
    return _amp_runs[key]


def query_nvidia_smi(fields: str, device_index: int | None = None) -> list[str]:
    """Return the answer of `nvidia-smi --query-gpu=fields` for one GPU, one string per field; [] if it fails.

    >>> query_nvidia_smi("no_such_field")
    []
    """
    selection = [] if device_index is None else ["-i", _smi_id(device_index)]
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", *selection]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.strip().splitlines()
    return [value.strip() for value in lines[0].split(",")] if lines else []


def _too_old(half: torch.dtype, device_index: int) -> str:
    major, minor = AMP_SINCE[half]
    has_major, has_minor = torch.cuda.get_device_capability(device_index)
    prefix = "" if half is torch.float16 else "For bfloat16, "
    return (
        f"{prefix}AMP only support NVIDIA GPU with Compute Capability {major}.{minor} or higher, current GPU is: "
        f"{torch.cuda.get_device_name(device_index)}, with Compute Capability: {has_major}.{has_minor}."
    )


def _is_supported(half: torch.dtype, device: str | torch.device | None) -> bool:
    kind, index = parse_device(device)
    if kind == "auto":
        kind = _default_kind()
    if kind == "cpu":
        return half is torch.bfloat16 and onednn_computes_bfloat16()
    if kind == "cuda":
        return gpu_computes(half, index or 0)
    return dtype_name(half) in backend_dtypes(kind)


def _default_kind() -> str:
    if cuda_device_count():
        return "cuda"
    return next((name for name in BACKEND_DTYPES if backend_dtypes(name)), "cpu")


def gpu_computes(half: torch.dtype, index: int) -> bool:
    """Return whether the GPU of an index computes in a half dtype; False without any GPU."""
    count = cuda_device_count()
    if not count:
        return False
    if index >= count:
        raise ValueError(f"unknown device 'gpu:{index}'; this machine has gpu:0 to gpu:{count - 1}")
    return is_rocm() or torch.cuda.get_device_capability(index) >= COMPUTE_SINCE[half]


def backend_dtypes(name: str) -> tuple[str, ...]:
    """Return the half dtypes of a backend, () if it is absent; the backend itself is asked about bfloat16."""
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return ()
    has_bfloat16 = getattr(module, "is_bf16_supported", bool)()
    return (*BACKEND_DTYPES[name], "bfloat16") if has_bfloat16 else BACKEND_DTYPES[name]


def cuda_device_count() -> int:
    """Return the number of usable CUDA or ROCm devices."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_rocm() -> bool:
    """Return whether torch was built for ROCm."""
    return getattr(torch.version, "hip", None) is not None


def _smi_id(device_index: int) -> str:
    """Return the GPU's uuid: torch's index follows CUDA_VISIBLE_DEVICES, nvidia-smi's does not."""
    uuid = getattr(torch.cuda.get_device_properties(device_index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(device_index)
