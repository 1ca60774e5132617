"""The clocks of the machine that a benchmark runs on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mezzo.amp import check_environment
from mezzo.amp.hardware import query_nvidia_smi

_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")


_PEAK_RATES = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Half-precision operations per second of Tensor Cores, dense, from the vendor's data sheets; special names first."""


def peak_rate(device: str) -> float | None:
    """Return the half-precision operations per second of a device; None if it is not known.

    >>> peak_rate("NVIDIA H200")
    989000000000000.0
    """
    return next((rate for name, rate in _PEAK_RATES.items() if name in device), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineClocks:
    """The machine of a measurement; a clock that cannot be read is '-'."""

    device: str
    mem_clock: str
    sm_clock: str
    cpu_clocks: str
    torch_version: str
    driver_version: str

    def table(self) -> list[list[str]]:
        """Return the device table of the AMP guide, header first."""
        header = ["Device", "MEM Clocks", "SM Clocks", "Running with CPU Clocks"]
        return [header, [self.device, self.mem_clock, self.sm_clock, self.cpu_clocks]]


def read_machine(device: torch.device) -> MachineClocks:
    """Return the machine with its present clocks; call it right after the work, before an idle GPU clocks down."""
    clocks = query_nvidia_smi("clocks.mem,clocks.sm", device.index or 0) if device.type == "cuda" else []
    mem_clock, sm_clock = clocks if len(clocks) == 2 else ("-", "-")
    environment = check_environment()
    name = environment.gpus[device.index or 0].name if device.type == "cuda" else f"{environment.cpu.name} (CPU)"
    return MachineClocks(
        device=name,
        mem_clock=mem_clock,
        sm_clock=sm_clock,
        cpu_clocks=_cpu_clocks(),
        torch_version=environment.torch_version,
        driver_version=environment.driver_version,
    )


def _cpu_clocks() -> str:
    """Return the CPU's lowest and highest clock; otherwise its present clock, or '-'."""
    try:
        limits = [int((_CPUFREQ / f"cpuinfo_{end}_freq").read_text()) // 1000 for end in ("min", "max")]
        return f"{limits[0]} - {limits[1]} MHz"
    except (OSError, ValueError):
        return _present_clock()


def _present_clock() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "-"
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return f"{max(clocks):.0f} MHz" if clocks else "-"
