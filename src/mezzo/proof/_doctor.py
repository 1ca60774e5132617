"""`advise`: measure a training step in float32 and in AMP, and find what keeps it from being faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from mezzo._arguments import check_at_least
from mezzo.amp import Fp8Recipe, GradScaler
from mezzo.devices import find_device
from mezzo.dtypes import dtype_name, parse_half_dtype
from mezzo.proof._advice import Advice
from mezzo.proof._examination import Examination, Progress
from mezzo.proof._fp8_rules import fp8
from mezzo.proof._measure import Measured, time_again
from mezzo.proof._memory import MemoryReport, mean_square, predict_fit
from mezzo.proof._number_rules import leaks, loss_scale
from mezzo.proof._shape_rules import layout, shapes, with_padding
from mezzo.proof._time_rules import LEAST_GAIN, amdahl, amp_itself, casts, hardware, launches, loader
from mezzo.record import Timing, drift_note, operator_log, unsteady_note
from mezzo.report import time_text
from mezzo.trial import NO_CHANGES, Changes, TrialSetup, Workload

RULES: tuple[Callable[[Examination], Any], ...] = (
    hardware, amp_itself, amdahl, launches, layout, shapes, casts, leaks, loss_scale, fp8, loader,
)  # fmt: skip

STEPS_AGAIN = 5
"""Maximum number of float32 steps that are timed again at the end."""
LOSS_TOLERANCE = 1e-2
"""Changes that move the last loss by a larger relative difference are left out: they must not change the training."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `advise`; print it."""

    setup: TrialSetup
    full: Measured
    amp: Measured
    advices: tuple[Advice, ...]
    """Largest gain first."""
    changes: Changes
    """All changes that need no edits of the model."""
    changed: Measured | None = None
    """The step with the changes applied; None if it was not measured."""
    is_less_than_advised: bool = False
    """Whether changes were left out because they made the step slower or changed its loss."""
    full_again: Timing | None = None
    """The float32 step, timed again at the end."""
    memory: MemoryReport | None = None
    """The predicted memory of a step, and whether it fits."""

    @property
    def speedup(self) -> float:
        """Speed-up of AMP over float32."""
        return self.full.step_s / self.amp.step_s

    @property
    def note(self) -> str:
        """A warning if times are not steady, otherwise empty."""
        steps = {"float32": self.full, f"AMP-{self.setup.level}": self.amp, "the changed step": self.changed}
        note = unsteady_note({name: step.timing for name, step in steps.items() if step is not None})
        if note or self.full_again is None:
            return note
        return drift_note("float32", self.full.timing, self.full_again)

    def of_kind(self, kind: str) -> list[Advice]:
        """Return the advice of one kind."""
        return [advice for advice in self.advices if advice.kind == kind]

    def __str__(self) -> str:
        amp, full = self.amp, self.full
        lines = [
            f"float32 {time_text(full.step_s)} per step, AMP-{self.setup.level} in {self.setup.dtype} "
            f"{time_text(amp.step_s)}: {self.speedup:.2f}x",
            f"kernels {time_text(amp.busy_s)}: products {_share(amp.product_s, amp)}, casts {_share(amp.cast_s, amp)}"
            + (f", converting to FP8 {_share(amp.convert_s, amp)}" if amp.convert_s else "")
            + (
                f"; host {time_text(amp.host_s)}, no kernel runs for {amp.idle_share:.0%} of a step"
                if amp.is_cuda
                else ""
            ),
        ]
        lines += [self.note] if self.note else []
        lines += ["", str(self.memory)] if self.memory is not None else []
        lines += ["", *(f"{number}. {advice}" for number, advice in enumerate(self.advices, start=1))]
        if self.changed is not None:
            gain = amp.step_s / self.changed.step_s
            lines += ["", f"with the changes: {time_text(self.changed.step_s)} per step, {gain:.2f}x as fast"]
        if self.is_less_than_advised:
            lines.append("changes that made the step slower or changed its loss were left out")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "level": self.setup.level,
            "dtype": self.setup.dtype,
            "speedup": self.speedup,
            "float32": _as_dict(self.full),
            "amp": _as_dict(self.amp),
            "changed": None if self.changed is None else _as_dict(self.changed),
            "changes": self.changes.to_dict(),
            "advices": [advice.to_dict() for advice in self.advices],
            "note": self.note,
            "memory": None if self.memory is None else self.memory.to_dict(),
        }


@operator_log.paused()
def advise(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    level: str = "O1",
    dtype: str = "float16",
    device: str | torch.device | None = None,
    steps: int = 10,
    loader: Any = None,
    scaler: GradScaler | None = None,
    measure_gains: bool = False,
    fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    progress: Progress | None = None,
) -> Report:
    """Measure a training step in float32 and in AMP, and return what keeps it from being faster, largest gain first.

    The model and the random states are unchanged: copies are trained. On a GPU each measured setup takes seconds.

    Args:
        model: Any module.
        inputs: One batch: a tuple of positional arguments, a dict of named ones, or the only argument.
        targets: Second argument of `loss_fn`.
        loss_fn: None: the mean square of all floating tensors in the output.
        level: O1, O2 or O3.
        dtype: float16 or bfloat16.
        device: None: the GPU if there is one.
        steps: Timed steps of each setup.
        loader: A data loader; its speed is compared with that of the step.
        scaler: The scaler of your training; its history replaces that of the measured steps.
        measure_gains: Also measure the gain of each advice that can be applied here, and of all safe changes together,
            as `mezzo doctor --apply` does.
        fp8: O3: a recipe or its settings; None: the default. A device without FP8 products emulates them.
        optimizer: For the predicted memory: `sgd`, `momentum`, `adam` or `adamw`. The measured steps are SGD's.
        progress: Called with the name of a measurement, its finished steps and its total steps.

    Raises:
        ValueError: A level or a number is not allowed, or the model has no parameters to train.
    """
    if level not in ("O1", "O2", "O3"):
        raise ValueError(f"level={level!r}: must be 'O1', 'O2' or 'O3'")
    check_at_least("steps", steps)
    _check_model(model)
    place = find_device(device, "device={!r}")
    workload = Workload(model, inputs, targets, loss_fn or mean_square)
    if fp8 is not None and level != "O3":
        raise ValueError(f"fp8 with level={level!r}: it belongs to level O3")
    recipe = None if fp8 is None else Fp8Recipe.of(fp8)
    setup = TrialSetup(level=level, dtype=dtype_name(parse_half_dtype(dtype)), fp8=recipe)
    capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else None
    exam = Examination(workload, setup, place, steps, capability, loader, scaler)
    if progress is not None:
        exam.progress = progress
    memory = predict_fit(workload, level=level, dtype=setup.dtype, fp8=recipe, optimizer=optimizer, device=place)
    report = examine(exam, measure_gains=measure_gains)
    again = time_again(workload, report.full.setup, place, min(steps, STEPS_AGAIN))
    return replace(report, full_again=again, memory=memory)


def _check_model(model: nn.Module) -> None:
    """Raise ValueError if a float32 step of the model cannot be measured."""
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise ValueError(f"the model is wrapped in {type(model).__name__}: pass the module inside, model.module")
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(f"{name!r} has no shape yet: run the model once first")
        if param.is_floating_point() and param.dtype is not torch.float32:
            raise ValueError(
                f"{name!r} is {dtype_name(param.dtype)}: pass the float32 model, before decorate, or "
                "amp.float32_copy(model)"
            )
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"the {type(model).__name__} has no parameters to train")


def examine(exam: Examination, *, measure_gains: bool = False) -> Report:
    """Apply every rule."""
    found = [advice for rule in RULES for advice in rule(exam)]
    changes = _all_changes(found)
    changed, is_less = None, False
    if measure_gains:
        found = [_measured(exam, advice) for advice in found]
        wanted, (changes, changed) = changes, _measure_together(exam, changes)
        is_less = changes != wanted
    found.sort(key=lambda advice: -(advice.measured_gain or (not advice.is_bound and advice.gain) or 1.0))
    return Report(exam.setup, exam.full, exam.amp, tuple(found), changes, changed, is_less)


def _all_changes(advices: list[Advice]) -> Changes:
    """Return the safe changes of all advice."""
    setups = [advice.setup.changes for advice in advices if advice.setup is not None]
    return Changes(
        channels_last=any(changes.channels_last for changes in setups),
        pad_channels=with_padding(advices),
        custom_white_list=tuple(sorted({name for changes in setups for name in changes.custom_white_list})),
    )


def _measured(exam: Examination, advice: Advice) -> Advice:
    if advice.setup is None:
        return advice
    after = exam.measure(advice.setup, f"with the advice about {advice.kind}")
    return replace(advice, measured_gain=exam.amp.step_s / after.step_s)


def _measure_together(exam: Examination, wanted: Changes) -> tuple[Changes, Measured | None]:
    """Return the changes that neither slow the step down nor move its loss, and the step with them.

    Only lists can move the loss; layout and padding only change the order of sums.
    """
    best, after = NO_CHANGES, exam.amp
    exact = replace(wanted, custom_white_list=())
    for candidate in (exact, Changes(channels_last=exact.channels_last)):
        if best.are_none and not candidate.are_none:
            tried = exam.measure(replace(exam.setup, changes=candidate), "all changes together")
            if exam.amp.step_s / tried.step_s >= 1 / LEAST_GAIN:
                best, after = candidate, tried
    if wanted.custom_white_list:
        candidate = replace(best, custom_white_list=wanted.custom_white_list)
        tried = exam.measure(replace(exam.setup, changes=candidate), "the lists too")
        is_same = abs(tried.losses[-1] - after.losses[-1]) <= LOSS_TOLERANCE * abs(after.losses[-1])
        if is_same and after.step_s / tried.step_s >= 1 / LEAST_GAIN:
            best, after = candidate, tried
    return best, None if best.are_none else after


def _as_dict(measured: Measured) -> dict[str, Any]:
    return {
        "step_s": measured.step_s,
        "host_s": measured.host_s,
        "busy_s": measured.busy_s,
        "product_s": measured.product_s,
        "cast_s": measured.cast_s,
        "fp8_s": measured.fp8_s,
        "convert_s": measured.convert_s,
        "launches": measured.num_launches,
        "idle_share": measured.idle_share,
        "tensor_core_share": measured.stats.tensor_core_share,
        "losses": [loss if math.isfinite(loss) else None for loss in measured.losses],
    }


def _share(seconds: float, of: Measured) -> str:
    return f"{seconds / of.busy_s:.0%}" if of.busy_s else "0%"
