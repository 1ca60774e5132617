"""`backend="auto"`: measures a step compiled and as written, and keeps the faster one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mezzo.static._capture import CapturedStep, random_numbers_kept
from mezzo.static._step import TrainingStep

AS_WRITTEN = "as written"
COMPILED = "compiled"
UNDECIDED = "none yet"
BACKEND_AS_WRITTEN = "as_written"
"""The backend of a step as written, which a GPU captures without a compiler."""
_ROUNDS = 5
_LEAST_ROUNDS = 2
_CLEAR = 1.5
"""Forms of a step that differ by more than this factor in each round are not measured further."""
_LEAST_GAIN = 0.98
"""The compiled step is kept if it takes less than this share of the time of the other one."""


@dataclass(slots=True)
class StepReport:
    """Which form of a step runs, and why; print it."""

    chosen: str = UNDECIDED
    """`compiled` or `as written`; `none yet` before the first batch."""
    backend: str = "auto"
    """Give it to `compile_step` to run the same form again."""
    reason: str = ""
    device: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each form: whole steps on a GPU, forward and backward pass on a CPU."""
    build_s: float = 0.0
    """Seconds that the first batch took to trace, compile, capture and measure; 0 if the step was only run."""

    def __str__(self) -> str:
        if self.chosen == UNDECIDED:
            return "the step was not called yet: the first batch decides whether it runs compiled or as written"
        lines = [f"the step runs {self.chosen}: {self.reason}"]
        lines += [f"  {name}: {seconds * 1e3:.2f} ms" for name, seconds in self.seconds.items()]
        if self.build_s:
            what = "compile and measure" if self.seconds else "build the step"
            lines.append(f"  the first batch took {self.build_s:.1f} s on {self.device} to {what}")
        return "\n".join(lines)


def decide(report: StepReport) -> None:
    """Choose the faster form from the measured seconds."""
    written, compiled = report.seconds[AS_WRITTEN], report.seconds[COMPILED]
    if compiled < _LEAST_GAIN * written:
        report.chosen, report.backend = COMPILED, "inductor"
        report.reason = f"{written / compiled:.2f} times as fast as the step as written"
    else:
        report.chosen, report.backend = AS_WRITTEN, BACKEND_AS_WRITTEN
        report.reason = _reason_against(written, compiled)


def _reason_against(written: float, compiled: float) -> str:
    if compiled < written:
        return "compiled code is less than 2 % faster (backend='inductor' would use it all the same)"
    return f"compiled code takes {compiled / written:.2f} times as long"


def time_replays(step: CapturedStep, batch: Sequence[Tensor], device: torch.device) -> float:
    """Return the seconds of a captured step; what its replays change is restored."""
    with step.rehearsal():
        if not step.prepare_replay(batch):
            raise AssertionError("a step that was captured just now can be replayed")
        step.run(batch)
        return fastest_round(lambda: step.run(batch), lambda: torch.cuda.synchronize(device))


def time_gradients(
    compiled: TrainingStep, written: TrainingStep, batch: Sequence[Tensor], device: torch.device
) -> tuple[float, float]:
    """Return the seconds of the forward and backward passes of both forms of a step on a CPU; nothing changes.

    The first pass of each, which may compile, is not timed. Then they run in turns, until one is
    clearly faster or five times. The update is the same in both forms. The model gets a copy of the
    batch: it may write into its inputs, and they may collect gradients.

    Raises:
        CompilerError: The compiler failed; the step as written was not run.
    """
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch]
    times: tuple[list[float], list[float]] = [], []
    with compiled.gradients_put_aside(), compiled.rehearsal(), random_numbers_kept(device):
        for step in (compiled, written):
            step.differentiate(own)
        while len(times[0]) < _ROUNDS and not _is_clear(*times):
            for step, seconds in zip((compiled, written), times, strict=True):
                start = time.perf_counter()
                step.differentiate(own)
                seconds.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])  # other programs on the machine only add time


def _is_clear(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether all times of one form are far below all times of the other one."""
    return len(one) >= _LEAST_ROUNDS and (max(one) * _CLEAR < min(other) or max(other) * _CLEAR < min(one))


def fastest_round(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the seconds of the fastest round: other programs on the machine only add time."""
    times = []
    for _ in range(_ROUNDS):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)
