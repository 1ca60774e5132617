"""The tensor checker: it checks the result of every kernel, and names the first NaN or inf.

It listens to the recorder. It uses and seeds no random numbers, and changes no setting of torch.
"""

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.amp.user_lines import users_lines
from mezzo.files import say
from mezzo.record._checker_config import TensorCheckerConfig
from mezzo.record._findings import (
    MOVES,
    Finding,
    Kind,
    find_cause,
    is_mask,
    kept_inputs,
    outside_cause,
    own_infinities,
    result_dtype,
    results,
    stored_as,
)
from mezzo.record._kernel_runs import KernelOp, KernelRun
from mezzo.record._listening import modules_in_progress
from mezzo.record._tensor_numbers import (
    FLOAT16_INF_FROM,
    FLOAT16_MAX,
    DebugMode,
    NonFiniteError,
    TensorNumbers,
    is_reported,
    measure,
    undisturbed,
)

MAX_FINDINGS = 256
"""How many findings a checker keeps; further ones are counted, and printed or written."""
MAX_CHECKED = 10_000
"""How many tensors CHECK_ALL keeps; further ones are printed or written."""


@dataclass(frozen=True, slots=True)
class CheckedTensor:
    """A result that CHECK_ALL has checked."""

    op: str
    """As in the `[PRECISION]` line: `linear`, `linear_grad` for its gradient, `_to_copy` for a cast."""
    module: str
    phase: str
    step: int
    numbers: TensorNumbers


class _Log:
    """Writes the lines to standard output, or to one file per device."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[str, TextIO] = {}

    def write(self, line: str, device: str) -> None:
        if self._folder is None:
            say(line)
            return
        if device not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"worker_{device.replace(':', '')}.{os.environ.get('RANK') or os.getpid()}.log"
            self._files[device] = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        self._files[device].write(line + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class TensorChecker:
    """The findings of a configuration; they can be read while checking is on, and afterwards.

    `findings` are the kernels with NaN or inf (with CHECK_ALL_FOR_OVERFLOW and CHECK_ALL also those with values that
    float16 cannot hold), at most `MAX_FINDINGS`. `checked` are all results of CHECK_ALL, at most `MAX_CHECKED`.
    """

    wants_lines = True
    wants_times = False

    def __init__(self, config: TensorCheckerConfig) -> None:
        self.findings: list[Finding] = []
        self.num_findings = 0
        """All of them, kept or not."""
        self.checked: list[CheckedTensor] = []
        self.num_steps = 0
        """How many steps have begun, checked or not."""
        self._mode, self._height = config.debug_mode, config.stack_height_limit
        self._selection, self._log = config.selection, _Log(config.output_dir)
        self._has_raised = self._has_masks = False
        self._num_in_step = 0
        self._made_by_kernels: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Bad results of recorded kernels: as an input, they are not a mask from outside."""
        self._meant: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Results with deliberate infinities."""
        self._lock = threading.Lock()

    def begin_step(self) -> int:
        """Count a step and return its number; check again if an error was raised in the last one."""
        self._has_raised, self._num_in_step = False, 0
        self.num_steps += 1
        return self.num_steps - 1

    def close(self) -> None:
        """Close the files; they are opened again if there is more to write."""
        self._log.close()

    def wants(self, op: KernelOp) -> bool:
        """Whether an operator is followed: also views, because the gradient of a view is named after it."""
        return op.has_tensors

    def receive(self, kernel: KernelRun) -> None:
        """Check the results of a kernel that computes; memory that is only allocated may hold anything."""
        if self._has_raised or not kernel.op.computes:
            return
        outputs = results(kernel)
        if not outputs:
            if kernel.op.name in MOVES:
                self._notice_mask(kernel)
            return
        with undisturbed():
            is_finite, largest = extremes([tensor for _, tensor in outputs])
            is_beyond = self._mode >= DebugMode.CHECK_ALL_FOR_OVERFLOW and largest >= FLOAT16_INF_FROM
            if is_finite and not is_beyond and self._mode is not DebugMode.CHECK_ALL:
                return
            with self._lock:
                self._look(kernel, outputs, is_finite=is_finite)

    def _look(self, kernel: KernelRun, outputs: list[tuple[str, Tensor]], *, is_finite: bool) -> None:
        if is_finite and not self._selection.includes(kernel):
            return
        numbers = measure(outputs)
        inputs = [] if is_finite else kept_inputs(kernel)
        of_inputs = measure(inputs)
        # Masks are also noticed in operators that are not reported: their infinities reach other operators.
        is_meant = not is_finite and self._is_meant(kernel, inputs, of_inputs, outputs, numbers)
        if not is_finite:
            (self._meant if is_meant else self._made_by_kernels).update((tensor, True) for _, tensor in outputs)
        if not self._selection.includes(kernel):
            return
        if not is_meant or self._mode is DebugMode.CHECK_ALL:
            self._write(kernel, numbers)
        if is_meant or not any(not each.is_finite or self._is_beyond(each) for each in numbers):
            return
        kind, cause = self._explain(kernel, inputs, of_inputs, numbers)
        stack = (
            users_lines(self._height) if kernel.phase != "backward" or kernel.api_op else [kernel.line][: self._height]
        )
        finding = Finding(
            kernel.op.name, kernel.api_op or kernel.forward_op, kernel.module, kernel.phase, tuple(filter(None, stack)),
            result_dtype(outputs), tuple(of_inputs), tuple(numbers), kind, cause, max(self.num_steps - 1, 0),
        )  # fmt: skip
        self._add(finding)

    def _notice_mask(self, kernel: KernelRun) -> None:
        """Remember that deliberate infinities were written into a tensor: `scores[mask] = -inf`."""
        with undisturbed(), self._lock:
            inputs = kept_inputs(kernel)
            is_put = any(
                is_mask(each) or tensor in self._meant
                for (_, tensor), each in zip(inputs, measure(inputs), strict=True)
            )
            self._has_masks = self._has_masks or is_put

    def _add(self, finding: Finding) -> None:
        self.num_findings += 1
        self._num_in_step += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        if self._mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
            self._has_raised = True  # an error handler may compute with bad values
            raise NonFiniteError(str(finding), finding)

    def _is_beyond(self, numbers: TensorNumbers) -> bool:
        return self._mode >= DebugMode.CHECK_ALL_FOR_OVERFLOW and numbers.overflows_float16

    def _is_meant(
        self,
        kernel: KernelRun,
        inputs: Sequence[tuple[str, Tensor]],
        of_inputs: Sequence[TensorNumbers],
        outputs: Sequence[tuple[str, Tensor]],
        numbers: Sequence[TensorNumbers],
    ) -> bool:
        """Whether non-finite values are deliberate, or result from deliberate ones."""
        has_nan = any(each.num_nan for each in numbers)
        if own := own_infinities(kernel):
            self._has_masks = True
            return not has_nan or any(map(math.isnan, own))
        pairs = zip(inputs, of_inputs, strict=True)
        if any(is_mask(each) and not self._is_ours(tensor) for (_, tensor), each in pairs):
            self._has_masks = True
        if has_nan or self._culprit(inputs, of_inputs) is not None:
            return False
        if any(not each.is_finite for each in of_inputs):
            return self._has_masks
        # An in-place kernel has overwritten the input that held the infinity.
        return kernel.op.is_in_place and any(tensor in self._meant for _, tensor in outputs)

    def _culprit(self, inputs: Sequence[tuple[str, Tensor]], of_inputs: Sequence[TensorNumbers]) -> int | None:
        """Return the index of the first input that is bad without being deliberate."""
        for index, ((_, tensor), each) in enumerate(zip(inputs, of_inputs, strict=True)):
            if each.is_finite:
                continue
            if each.num_nan or not self._has_masks or self._is_ours(tensor):
                return index
        return None

    def _is_ours(self, tensor: Tensor) -> bool:
        """Whether a recorded kernel made it, or a module stores it as a parameter: then it is not a mask."""
        return tensor in self._made_by_kernels or "parameter" in stored_as(tensor, modules_in_progress())

    def _explain(
        self,
        kernel: KernelRun,
        inputs: Sequence[tuple[str, Tensor]],
        of_inputs: Sequence[TensorNumbers],
        outputs: Sequence[TensorNumbers],
    ) -> tuple[Kind, str]:
        if all(each.is_finite for each in outputs):
            largest = max(each.max_abs for each in outputs)
            return "would overflow", f"the largest value is {largest:.4g}, and float16 ends at {FLOAT16_MAX:.0f}"
        index = self._culprit(inputs, of_inputs)
        if index is None:
            return find_cause(kernel, of_inputs, outputs)
        bad, stored = of_inputs[index], stored_as(inputs[index][1], modules_in_progress())
        if self._num_in_step and not stored:
            return "carried", f"input `{bad.name}` was not finite already: the origin is an earlier finding"
        return "outside", outside_cause(bad, stored)

    def _write(self, kernel: KernelRun, numbers: Sequence[TensorNumbers]) -> None:
        for each in numbers:
            if self._mode is DebugMode.CHECK_ALL and len(self.checked) < MAX_CHECKED:
                self.checked.append(
                    CheckedTensor(_op_name(kernel), kernel.module, kernel.phase, self.num_steps - 1, each)
                )
            if is_reported(each, self._mode):
                self._log.write(each.precision_line(_op_name(kernel), _tensor_name(kernel, each)), each.device)


def extremes(tensors: Sequence[Tensor]) -> tuple[bool, float]:
    """Return whether all values are finite, and the largest magnitude, with one read of the device."""
    pairs = [torch.stack(torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())) for tensor in tensors]
    joined = pairs[0] if len(pairs) == 1 else torch.cat([pair.to(pairs[0].device).double() for pair in pairs])
    values = [abs(value) for value in joined.tolist()]
    return all(value < float("inf") for value in values), max(values)  # NaN is not less


def _op_name(kernel: KernelRun) -> str:
    if kernel.cast is not None:
        return kernel.op.name
    return kernel.api_op or (f"{kernel.forward_op}_grad" if kernel.forward_op else kernel.op.name)


def _tensor_name(kernel: KernelRun, numbers: TensorNumbers) -> str:
    grad = "@GRAD" if kernel.phase == "backward" and not kernel.api_op else ""
    return f"{kernel.module}{grad}{numbers.name.removeprefix('out')}"
