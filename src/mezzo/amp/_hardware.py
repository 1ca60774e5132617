"""What the hardware here can do: half dtypes, Tensor Cores, versions, and one line of advice.

Two questions with two thresholds (compute capability of an NVIDIA GPU):

* can it hold and compute the dtype at all: float16 from 5.3, bfloat16 from 8.0 (`is_*_supported`);
* does AMP pay there: float16 from 7.0, bfloat16 from 8.0 (`warn_if_unsupported`, `Environment.can_run_amp`).

ROCm passes both. A CPU always runs AMP: where it has no half units, mezzo computes half tensors inside in float32.
"""

import platform
import subprocess
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mezzo._torch.cpu_features import onednn_computes_bfloat16
from mezzo.amp._cpu import has_half_units
from mezzo.dtypes import HALF_DTYPES, dtype_name, parse_half_dtype
from mezzo.errors import unknown_choice
from mezzo.fp8 import LEAST_CAPABILITY

Capability = tuple[int, int]

UNKNOWN = "unknown"
COMPUTE_SINCE: dict[torch.dtype, Capability] = {torch.float16: (5, 3), torch.bfloat16: (8, 0)}
AMP_SINCE: dict[torch.dtype, Capability] = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
TENSOR_CORES_SINCE: Capability = (7, 0)
TF32_SINCE: Capability = (8, 0)

# The guide's table 1.3, for the backends that torch knows besides CUDA and CPU.
BACKEND_DTYPES: dict[str, tuple[str, ...]] = {"npu": ("float16",), "xpu": ("float16",), "mlu": ("float16",)}

_CPU_HALF_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "fphp", "asimdhp")
_amp_runs: dict[tuple[int, torch.dtype], bool] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One CUDA or ROCm device."""

    name: str
    capability: Capability
    memory_gib: float
    float16: bool
    bfloat16: bool
    fp8: bool
    tf32: bool
    tensor_cores: bool
    is_rocm: bool = False

    def can_run_amp(self, dtype: torch.dtype) -> bool:
        """Return whether AMP is worth running here in `dtype`."""
        return self.is_rocm or self.capability >= AMP_SINCE[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor: its vector instructions and its units for half arithmetic."""

    name: str
    capability: str
    float16: bool
    bfloat16: bool
    half_instructions: tuple[str, ...]
    """Instruction sets for half numbers that it names, such as `avx512_bf16`; what they are worth is measured."""

    fast_dtypes: tuple[str, ...]
    """Half dtypes that keep up with float32 in mezzo's own measurement; AMP computes the others inside in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What was found here. `print(environment)` shows it as lines, `to_dict()` gives it as JSON-ready data."""

    gpus: tuple[Gpu, ...]
    cpu: Cpu
    backends: dict[str, str]
    """npu, xpu, mlu: the half dtypes the guide names for it, or 'unsupported' where torch has no such device."""

    driver_version: str
    torch_version: str
    cuda_version: str
    cudnn_version: str
    advice: str

    @property
    def device_count(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    @property
    def best_gpu(self) -> Gpu | None:
        """The GPU of the highest compute capability, or None."""
        return _best(self.gpus)

    def can_run_amp(self, dtype: str | torch.dtype = "float16") -> bool:
        """Return whether AMP is usable in `dtype` on the best device here; a CPU always is, by emulation."""
        half = parse_half_dtype(dtype)
        gpu = self.best_gpu
        return gpu is None or gpu.can_run_amp(half)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain dicts, lists, strings, numbers and booleans."""
        return {**asdict(self), "device_count": self.device_count}

    def rows(self) -> list[tuple[str, str]]:
        """Return (what, value) pairs in the order in which they are shown."""
        rows = [("devices", f"{self.device_count} GPU" if self.device_count == 1 else f"{self.device_count} GPUs")]
        for index, gpu in enumerate(self.gpus):
            rows += _gpu_rows(f"gpu:{index}", gpu)
        rows += _cpu_rows(self.cpu)
        rows += [("driver", self.driver_version), ("torch", self.torch_version)]
        rows += [("cuda", self.cuda_version), ("cudnn", self.cudnn_version)]
        rows += list(self.backends.items())
        return [*rows, ("advice", self.advice)]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


def check_environment() -> Environment:
    """Return what the hardware and the installed torch offer for mixed precision, with one line of advice."""
    gpus = tuple(_probe_gpu(index) for index in range(_cuda_device_count()))
    cpu = _probe_cpu()
    return Environment(
        gpus=gpus,
        cpu=cpu,
        backends={name: ", ".join(_backend_dtypes(name)) or "unsupported" for name in BACKEND_DTYPES},
        driver_version=_driver_version() if gpus else UNKNOWN,
        torch_version=str(torch.__version__),
        cuda_version=_toolkit_version(),
        cudnn_version=_cudnn_version(),
        advice=_advise(gpus, cpu),
    )


def is_float16_supported(device: str | torch.device | None = None) -> bool:
    """Return whether `device` computes in float16: cpu, gpu, gpu:i, cuda, cuda:i, xpu, npu or mlu; None: the default.

    An NVIDIA GPU does from compute capability 5.3; a CPU counts as not, since mezzo computes inside in float32 there.

    >>> is_float16_supported("cpu")
    False
    """
    return _is_supported(torch.float16, device)


def is_bfloat16_supported(device: str | torch.device | None = None) -> bool:
    """Return whether `device` computes in bfloat16; devices as in `is_float16_supported`.

    An NVIDIA GPU does from compute capability 8.0; a CPU with oneDNN and AVX-512 or AMX.
    """
    return _is_supported(torch.bfloat16, device)


def warn_if_unsupported(dtype: str | torch.dtype, device_index: int = 0) -> bool:
    """Return whether AMP runs in `dtype` on this GPU; where it does not, warn, once a process for each GPU and dtype.

    True without a GPU: there is nothing to warn of.
    """
    half = parse_half_dtype(dtype)
    key = (device_index, half)
    if key not in _amp_runs:
        if device_index >= _cuda_device_count():
            return True
        _amp_runs[key] = _is_rocm() or torch.cuda.get_device_capability(device_index) >= AMP_SINCE[half]
        if not _amp_runs[key]:
            warnings.warn(_too_old(half, device_index), UserWarning, stacklevel=3)
    return _amp_runs[key]


def query_nvidia_smi(fields: str, device_index: int | None = None) -> list[str]:
    """Return what `nvidia-smi --query-gpu=fields` says of one GPU, one string a field; [] where it cannot be asked.

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
    if kind == "cpu":
        return half is torch.bfloat16 and onednn_computes_bfloat16()
    if kind == "cuda":
        return _gpu_computes(half, index)
    return dtype_name(half) in _backend_dtypes(kind)


def parse_device(device: str | torch.device | None) -> tuple[str, int]:
    """Return the kind (cpu, cuda, npu, xpu, mlu) and index of a device; gpu is another name of cuda.

    >>> parse_device("gpu:1")
    ('cuda', 1)
    """
    if device is None:
        return _default_kind(), 0
    kind, _, index = str(device).partition(":")
    kind = "cuda" if kind == "gpu" else kind
    if kind not in ("cpu", "cuda", *BACKEND_DTYPES) or (index and not index.isdecimal()):
        allowed = ("cpu", "gpu", "gpu:i", "cuda", "cuda:i", "xpu", "npu", "mlu")
        raise ValueError(unknown_choice("device", str(device), allowed))
    return kind, int(index or 0)


def _default_kind() -> str:
    if _cuda_device_count():
        return "cuda"
    return next((name for name in BACKEND_DTYPES if _backend_dtypes(name)), "cpu")


def _gpu_computes(half: torch.dtype, index: int) -> bool:
    count = _cuda_device_count()
    if not count:
        return False
    if index >= count:
        raise ValueError(f"unknown device 'gpu:{index}'; this machine has gpu:0 to gpu:{count - 1}")
    return _is_rocm() or torch.cuda.get_device_capability(index) >= COMPUTE_SINCE[half]


def _backend_dtypes(name: str) -> tuple[str, ...]:
    """Return the half dtypes of a present backend, () for an absent one; the backend's own word on bfloat16 counts."""
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return ()
    has_bfloat16 = getattr(module, "is_bf16_supported", bool)()
    return (*BACKEND_DTYPES[name], "bfloat16") if has_bfloat16 else BACKEND_DTYPES[name]


def _cuda_device_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _is_rocm() -> bool:
    return getattr(torch.version, "hip", None) is not None


def _probe_gpu(index: int) -> Gpu:
    name, rocm = torch.cuda.get_device_name(index), _is_rocm()
    capability = torch.cuda.get_device_capability(index)
    return Gpu(
        name=name,
        capability=capability,
        memory_gib=round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
        float16=_gpu_computes(torch.float16, index),
        bfloat16=_gpu_computes(torch.bfloat16, index),
        fp8=not rocm and capability >= LEAST_CAPABILITY and hasattr(torch, "float8_e4m3fn"),
        tf32=not rocm and capability >= TF32_SINCE,
        # Turing's GTX 16 cards report 7.5 as the RTX ones do, but were made without the Tensor Cores
        tensor_cores=not rocm and capability >= TENSOR_CORES_SINCE and "GTX 16" not in name,
        is_rocm=rocm,
    )


def _probe_cpu() -> Cpu:
    return Cpu(
        name=_cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        float16=is_float16_supported("cpu"),
        bfloat16=is_bfloat16_supported("cpu"),
        half_instructions=tuple(name for name in _CPU_HALF_INSTRUCTIONS if name in _cpu_flags()),
        fast_dtypes=tuple(dtype_name(half) for half in HALF_DTYPES if has_half_units(half)),
    )


@cache
def _cpu_info() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo as a dict; empty elsewhere than on Linux."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine() or UNKNOWN


def _cpu_flags() -> set[str]:
    info = _cpu_info()
    return set((info.get("flags") or info.get("Features") or "").split())


def _driver_version() -> str:
    return next(iter(query_nvidia_smi("driver_version")), UNKNOWN)


def _smi_id(device_index: int) -> str:
    """Return the GPU's uuid: torch's index counts CUDA_VISIBLE_DEVICES, nvidia-smi's does not."""
    uuid = getattr(torch.cuda.get_device_properties(device_index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else str(device_index)


def _toolkit_version() -> str:
    if _is_rocm():
        return f"ROCm {torch.version.hip}"
    return torch.version.cuda or "none"


def _cudnn_version() -> str:
    number = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if number is None:
        return "none"
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _best(gpus: tuple[Gpu, ...]) -> Gpu | None:
    return max(gpus, key=lambda gpu: gpu.capability, default=None)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _advise(gpus: tuple[Gpu, ...], cpu: Cpu) -> str:
    gpu = _best(gpus)
    if gpu is None:
        return _advise_cpu(cpu)
    if gpu.can_run_amp(torch.bfloat16):
        return "use level O2 in bfloat16: as fast as float16 on this GPU, and it needs no GradScaler"
    if gpu.can_run_amp(torch.float16):
        return (
            "use level O2 in float16 with a GradScaler: the Tensor Cores speed up float16; "
            f"bfloat16 needs compute capability 8.0, this GPU has {_dotted(gpu.capability)}"
            if gpu.tensor_cores
            else "use level O2 in float16 with a GradScaler to halve memory; without Tensor Cores it is not much faster"
        )
    return f"stay at level O0 (float32): AMP needs compute capability 7.0, {gpu.name} has {_dotted(gpu.capability)}"


def _advise_cpu(cpu: Cpu) -> str:
    if "bfloat16" in cpu.fast_dtypes:
        return "use level O1 in bfloat16: this CPU computes it at full speed, and it needs no GradScaler"
    return "use level O0 (float32) for speed; AMP runs here for tests, in both dtypes, computed inside in float32"


def _gpu_rows(label: str, gpu: Gpu) -> list[tuple[str, str]]:
    return [
        (label, f"{gpu.name}, {gpu.memory_gib} GiB"),
        (f"{label} capability", str(gpu.capability)),
        *((f"{label} {what}", _yes(has)) for what, has in _gpu_abilities(gpu)),
    ]


def _gpu_abilities(gpu: Gpu) -> list[tuple[str, bool]]:
    return [
        ("float16", gpu.float16),
        ("bfloat16", gpu.bfloat16),
        ("FP8", gpu.fp8),
        ("TF32", gpu.tf32),
        ("Tensor Cores", gpu.tensor_cores),
    ]


def _cpu_rows(cpu: Cpu) -> list[tuple[str, str]]:
    return [
        ("cpu", f"{cpu.name}, {cpu.capability}"),
        *((f"cpu {name}", _cpu_ability(cpu, name, has)) for name, has in _cpu_abilities(cpu)),
        ("cpu half instructions", ", ".join(cpu.half_instructions) or "none"),
    ]


def _cpu_abilities(cpu: Cpu) -> list[tuple[str, bool]]:
    return [("float16", cpu.float16), ("bfloat16", cpu.bfloat16)]


def _cpu_ability(cpu: Cpu, name: str, is_supported: bool) -> str:
    if name in cpu.fast_dtypes:
        return "yes, at full speed"
    return f"{'slow' if is_supported else 'no'}: AMP computes inside in float32"


def _yes(has: bool) -> str:
    return "yes" if has else "no"
