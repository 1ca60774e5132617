"""The measurements that the rules use: a float32 step, an AMP step, and variants of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from mezzo.amp import GradScaler
from mezzo.proof._measure import (
    Measured,
    Observed,
    copy_bandwidth,
    fp8_rows,
    fp8_speedup,
    measure,
    observe,
    product_speedup,
)
from mezzo.record import Fp8Row
from mezzo.trial import TrialSetup, Workload

Progress = Callable[[str, int, int], None]

GRAPH_GAP_S = 0.5e-6
"""Gap between two kernels of a CUDA graph: 0.3 to 0.6 microseconds in four networks on an H200."""


@dataclass(eq=False)
class Examination:
    """Measurements of a workload, cached; variants are measured when a rule asks for them."""

    workload: Workload
    setup: TrialSetup
    device: torch.device
    steps: int
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None on a CPU."""
    loader: Any = None
    scaler: GradScaler | None = None
    progress: Progress = lambda *_: None
    _measured: dict[TrialSetup, Measured] = field(default_factory=dict)
    _observed: dict[TrialSetup, Observed] = field(default_factory=dict)

    def observe(self, setup: TrialSetup, what: str) -> Observed:
        """Record one step of a setup without timing it."""
        if setup not in self._observed:
            self.progress(what, 0, 1)
            self._observed[setup] = observe(self.workload, setup, self.device)
            self.progress(what, 1, 1)
        return self._observed[setup]

    def measure(self, setup: TrialSetup, what: str) -> Measured:
        """Time and record the steps of a setup."""
        if setup not in self._measured:
            self.progress(what, 0, self.steps)
            self._measured[setup] = measure(self.workload, setup, self.device, self.steps)
            self.progress(what, self.steps, self.steps)
        return self._measured[setup]

    @cached_property
    def full(self) -> Measured:
        """The step in float32."""
        return self.measure(replace(self.setup, level="O0", is_decorated=False, is_captured=False), "float32 step")

    @cached_property
    def amp(self) -> Measured:
        """The step in AMP, without changes."""
        return self.measure(self.setup, f"AMP-{self.setup.level} step")

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The half dtype."""
        return torch.float16 if self.setup.dtype == "float16" else torch.bfloat16

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy."""
        return copy_bandwidth(self.device)

    @cached_property
    def product_speedup(self) -> float:
        """Speed-up of a large half product over float32 on this device."""
        return product_speedup(self.device, self.dtype)

    @cached_property
    def fp8_speedup(self) -> float:
        """Speed-up of a large FP8 product over half on this device."""
        return fp8_speedup(self.device, self.dtype)

    @cached_property
    def fp8_rows(self) -> list[Fp8Row]:
        """Rounding of the operands of FP8 products, the largest loss first."""
        return fp8_rows(self.workload, self.setup, self.device)

    def layer(self, path: str) -> nn.Module:
        """Return a layer of the model by its path below the outermost module."""
        return self.workload.model.get_submodule(path)

    def with_changes(self, **changes: Any) -> TrialSetup:
        """Return the setup with additional changes to the model."""
        return replace(self.setup, changes=replace(self.setup.changes, **changes))

    def gain_of(self, after: Observed) -> float:
        """Return the predicted gain of a setup from the kernels of one of its steps."""
        return self.amp.step_s / self.amp.predicted_s(after.busy_s, after.num_launches)

    def gain_captured(self, after: Observed) -> float:
        """Return the predicted gain of a setup as one CUDA graph, without host time."""
        return self.amp.step_s / (after.busy_s + after.num_launches * GRAPH_GAP_S)

    def gain_without(self, seconds: float) -> float:
        """Return the predicted gain without `seconds` of kernel time."""
        return self.amp.step_s / self.amp.predicted_s(max(0.0, self.amp.busy_s - seconds))
