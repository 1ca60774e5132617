"""The options of engines."""

from dataclasses import dataclass
from typing import Annotated

from mezzo._options import Option, check_options
from mezzo.devices import CPU_OR_GPU, find_device, parse_device
from mezzo.dtypes import PRECISION_DTYPES

PRECISIONS = (*PRECISION_DTYPES, "int8")
AUTO = "auto"
ENGINE_NAMES = ("onnxruntime", "openvino", "torch-graph", "torch", "torch-compiled", "torch-aoti")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Device, threads and precision of an engine."""

    device: Annotated[str, Option("auto, cpu, gpu or gpu:N.", suggest=lambda: ("auto", "cpu", "gpu"))] = "cpu"
    """A name that `mezzo.devices.parse_device` reads; it becomes `cpu` or `cuda:N`."""
    threads: Annotated[int, Option("CPU threads; 0: one per core.", "--cpu-threads", "--threads", at_least=0)] = 0
    precision: Annotated[str, Option(f"{', '.join(PRECISIONS)}.", suggest=lambda: PRECISIONS)] = "fp32"

    def __post_init__(self) -> None:
        check_options(self)
        kind, number = parse_device(self.device, CPU_OR_GPU)
        if kind == "auto":
            kind = find_device().type
        object.__setattr__(self, "device", "cpu" if kind == "cpu" else f"cuda:{number or 0}")

    @property
    def on_gpu(self) -> bool:
        """Whether the engine works on a GPU."""
        return self.gpu_index is not None

    @property
    def gpu_index(self) -> int | None:
        """The number of the GPU; None for the CPU."""
        return parse_device(self.device).number
