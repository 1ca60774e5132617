"""What this machine offers for mixed precision, as one report with a line of advice: `check_environment`."""

import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mezzo.amp._cpu import has_half_units
from mezzo.amp.hardware import (
    AMP_SINCE,
    BACKEND_DTYPES,
    CPU_HALF_INSTRUCTIONS,
    TENSOR_CORES_SINCE,
    TF32_SINCE,
    Capability,
    backend_dtypes,
    cuda_device_count,
    gpu_computes,
    is_bfloat16_supported,
    is_float16_supported,
    is_rocm,
    query_nvidia_smi,
)
from mezzo.amp.support import BACKENDS, describe_backends, describe_torch, is_supported_torch
from mezzo.dtypes import HALF_DTYPES, dtype_name, parse_half_dtype
from mezzo.fp8 import LEAST_CAPABILITY

UNKNOWN = "unknown"


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
        """Return whether AMP is worth using on this GPU in `dtype`."""
        return self.is_rocm or self.capability >= AMP_SINCE[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor: its vector instructions and its units for half arithmetic."""

    name: str
    capability: str
    float16: bool
    bfloat16: bool
    half_instructions: tuple[str, ...]
    """Instruction sets for half arithmetic that the CPU reports, such as `avx512_bf16`. They do not promise speed."""

    fast_dtypes: tuple[str, ...]
    """Half dtypes measured to be as fast as float32. In the others AMP computes heavy operators in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Hardware and versions of this machine. Print it as a table, or call `to_dict()` for JSON."""

    gpus: tuple[Gpu, ...]
    cpu: Cpu
    backends: dict[str, str]
    """npu, xpu, mlu: their half dtypes, or 'unsupported' if torch finds no such device."""

    driver_version: str
    torch_version: str
    torch_release: str
    """Whether mezzo is tested with this release of torch, in one line."""

    support: dict[str, str]
    """Backends of torch: tested, untested or refused."""

    cuda_version: str
    cudnn_version: str
    advice: str

    @property
    def device_count(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    @property
    def best_gpu(self) -> Gpu | None:
        """The GPU with the highest compute capability, or None."""
        return _best(self.gpus)

    def can_run_amp(self, dtype: str | torch.dtype = "float16") -> bool:
        """Return whether AMP is usable in `dtype` on the best device; without a GPU, if this torch is supported."""
        half = parse_half_dtype(dtype)
        gpu = self.best_gpu
        return is_supported_torch(self.torch_version) and (gpu is None or gpu.can_run_amp(half))

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
        rows += [("torch release", self.torch_release), ("backends", describe_backends())]
        rows += [("cuda", self.cuda_version), ("cudnn", self.cudnn_version)]
        rows += list(self.backends.items())
        return [*rows, ("advice", self.advice)]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


def check_environment() -> Environment:
    """Return what hardware and torch offer for mixed precision, with one line of advice."""
    gpus = tuple(_probe_gpu(index) for index in range(cuda_device_count()))
    cpu = _probe_cpu()
    return Environment(
        gpus=gpus,
        cpu=cpu,
        backends={name: ", ".join(backend_dtypes(name)) or "unsupported" for name in BACKEND_DTYPES},
        driver_version=_driver_version() if gpus else UNKNOWN,
        torch_version=str(torch.__version__),
        torch_release=describe_torch(str(torch.__version__)),
        support=dict(BACKENDS),
        cuda_version=_toolkit_version(),
        cudnn_version=_cudnn_version(),
        advice=_advise(gpus, cpu),
    )


def _probe_gpu(index: int) -> Gpu:
    name, rocm = torch.cuda.get_device_name(index), is_rocm()
    capability = torch.cuda.get_device_capability(index)
    return Gpu(
        name=name,
        capability=capability,
        memory_gib=round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
        float16=gpu_computes(torch.float16, index),
        bfloat16=gpu_computes(torch.bfloat16, index),
        fp8=not rocm and capability >= LEAST_CAPABILITY and hasattr(torch, "float8_e4m3fn"),
        tf32=not rocm and capability >= TF32_SINCE,
        # GTX 16 cards report capability 7.5 like RTX cards, but have no Tensor Cores.
        tensor_cores=not rocm and capability >= TENSOR_CORES_SINCE and "GTX 16" not in name,
        is_rocm=rocm,
    )


def _probe_cpu() -> Cpu:
    return Cpu(
        name=_cpu_name(),
        capability=torch.backends.cpu.get_cpu_capability(),
        float16=is_float16_supported("cpu"),
        bfloat16=is_bfloat16_supported("cpu"),
        half_instructions=tuple(name for name in CPU_HALF_INSTRUCTIONS if name in _cpu_flags()),
        fast_dtypes=tuple(dtype_name(half) for half in HALF_DTYPES if has_half_units(half)),
    )


@cache
def _cpu_info() -> dict[str, str]:
    """Return the first processor's entry of /proc/cpuinfo; empty unless on Linux."""
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


def _toolkit_version() -> str:
    if is_rocm():
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
