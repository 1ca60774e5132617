"""The tensor checker: every kernel's result is looked at as it is made, and the first NaN or inf is named.

It listens to the recorder. Nobody's random numbers are drawn or re-seeded, and no setting of torch is changed.
"""

import functools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.amp import OPS, VARIANTS, resolve_list, resolve_name
from mezzo.amp.user_lines import users_lines
from mezzo.errors import unknown_choice
from mezzo.files import say
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
from mezzo.record._recorder import _start, _stop, listening, modules_in_progress
from mezzo.record._seen import Op, Seen
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
    """A result that CHECK_ALL has looked at."""

    op: str
    """As in the `[PRECISION]` line: `linear`, `linear_grad` for its gradient, `_to_copy` for a cast."""
    module: str
    phase: str
    step: int
    numbers: TensorNumbers


@dataclass(frozen=True, eq=False, slots=True)
class TensorCheckerConfig:
    """What the tensor checker looks at, and what it does with it.

    Args:
        enable: Whether to check at all.
        debug_mode: What is looked for, and what happens then.
        output_dir: Folder for the lines, one file a device and process, appended to; None: they are printed.
        checked_op_list: Only these operators; names as in operator lists, so Paddle's work too. None: all.
        skipped_op_list: Not these.
        debug_step: `[a, b]`: steps a to b - 1, counted from 0 by the calls of `enable_tensor_checker` with this object.
        stack_height_limit: How many lines of the user's code a finding holds, from the innermost outwards.
    """

    enable: bool = True
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
    output_dir: str | os.PathLike[str] | None = None
    checked_op_list: Sequence[str] | None = None
    skipped_op_list: Sequence[str] | None = None
    debug_step: Sequence[int] | None = None
    stack_height_limit: int = 1
    _checker: "list[TensorChecker]" = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.enable, bool):
            raise TypeError(f"enable={self.enable!r}: must be True or False")
        try:
            object.__setattr__(self, "debug_mode", DebugMode(self.debug_mode))
        except ValueError:
            raise ValueError(unknown_choice("debug_mode", self.debug_mode, [str(mode) for mode in DebugMode])) from None
        if self.output_dir is not None and not isinstance(self.output_dir, str | os.PathLike):
            raise TypeError(f"output_dir={self.output_dir!r}: must be the path of a folder, or None")
        _check_window(self.debug_step)
        limit = self.stack_height_limit
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise ValueError(f"stack_height_limit={limit!r}: must be a number of lines, 0 or more")
        self._checker.append(TensorChecker(self))

    def is_in_window(self, step: int) -> bool:
        """Whether a step, counted from 0, is checked."""
        if not self.enable:
            return False
        return self.debug_step is None or self.debug_step[0] <= step < self.debug_step[1]


def _check_window(window: object) -> None:
    if window is None:
        return
    if not isinstance(window, list | tuple) or len(window) != 2:
        raise ValueError(f"debug_step={window!r}: must be [first, end], two step numbers")
    if not all(isinstance(step, int) and not isinstance(step, bool) for step in window):
        raise ValueError(f"debug_step={window!r}: step numbers are integers")
    if not 0 <= window[0] < window[1]:
        raise ValueError(f"debug_step={window!r}: the first step must be 0 or more, and less than the end")


class _Selection:
    """Which kernels are looked at, by the operator lists of a configuration."""

    def __init__(self, config: TensorCheckerConfig) -> None:
        checked = resolve_list(config.checked_op_list, "checked_op_list")
        skipped = resolve_list(config.skipped_op_list, "skipped_op_list")
        self._checked = frozenset().union(*checked.values()) if config.checked_op_list is not None else None
        self._skipped = frozenset().union(*skipped.values())

    def holds(self, seen: Seen) -> bool:
        if self._checked is None and not self._skipped:
            return True
        variants = _variants_of(seen)
        return not variants & self._skipped and (self._checked is None or bool(variants & self._checked))


def _variants_of(seen: Seen) -> frozenset[str]:
    """Return what the lists may know a kernel by: its call, the call whose gradient it computes, the kernel itself."""
    kernel = OPS.get(seen.op.name)
    own: str = seen.op.name
    if kernel is not None and kernel.classify is not None:
        own = kernel.classify(seen.args, seen.kwargs)
    return frozenset().union(*(_meaning(name) for name in (seen.variant, seen.forward_op, own)))


@functools.cache
def _meaning(name: str) -> frozenset[str]:
    """Return the variants that an operator's own name means: no group, so `matmul` is `matmul` alone."""
    if name in VARIANTS:
        return frozenset({name})
    if name in OPS:
        return frozenset(OPS[name].variants)
    try:
        return resolve_name(name)
    except ValueError:
        return frozenset()


class _Log:
    """Where the lines go: standard output, or one file a device."""

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
    """What a configuration has found; it can be read while checking is on, and afterwards.

    `findings` are the kernels with NaN or inf (with CHECK_ALL_FOR_OVERFLOW and CHECK_ALL also those with more than
    float16 holds), at most `MAX_FINDINGS`; `checked` are all results looked at by CHECK_ALL, at most `MAX_CHECKED`.
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
        self._selection, self._log = _Selection(config), _Log(config.output_dir)
        self._has_raised = self._has_masks = False
        self._num_in_step = 0
        self._made_here: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Bad results of kernels: used as an input, they are no mask from outside."""
        self._meant: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Results with infinities that are meant."""
        self._lock = threading.Lock()

    def begin_step(self) -> int:
        """Count a step, and look again if an error was raised in the last one; return its number."""
        self._has_raised, self._num_in_step = False, 0
        self.num_steps += 1
        return self.num_steps - 1

    def close(self) -> None:
        """Close the files; they are opened again if there is more to write."""
        self._log.close()

    def wants(self, op: Op) -> bool:
        """Whether an operator is followed: views too, as the gradient of a view computes and is named by the view."""
        return op.has_tensors

    def see(self, seen: Seen) -> None:
        """Look at the results of a kernel that computes; memory that is only allocated holds anything."""
        if self._has_raised or not seen.op.computes:
            return
        outputs = results(seen)
        if not outputs:
            if seen.op.name in MOVES:
                self._notice_mask(seen)
            return
        with undisturbed():
            is_finite, largest = extremes([tensor for _, tensor in outputs])
            is_beyond = self._mode >= DebugMode.CHECK_ALL_FOR_OVERFLOW and largest >= FLOAT16_INF_FROM
            if is_finite and not is_beyond and self._mode is not DebugMode.CHECK_ALL:
                return
            with self._lock:
                self._look(seen, outputs, is_finite=is_finite)

    def _look(self, seen: Seen, outputs: list[tuple[str, Tensor]], *, is_finite: bool) -> None:
        if is_finite and not self._selection.holds(seen):
            return
        numbers = measure(outputs)
        inputs = [] if is_finite else kept_inputs(seen)
        of_inputs = measure(inputs)
        # Masks are noticed in operators that are not reported, too: others go on with their infinities.
        is_meant = not is_finite and self._is_meant(seen, inputs, of_inputs, outputs, numbers)
        if not is_finite:
            (self._meant if is_meant else self._made_here).update((tensor, True) for _, tensor in outputs)
        if not self._selection.holds(seen):
            return
        if not is_meant or self._mode is DebugMode.CHECK_ALL:
            self._write(seen, numbers)
        if is_meant or not any(not each.is_finite or self._is_beyond(each) for each in numbers):
            return
        kind, cause = self._explain(seen, inputs, of_inputs, numbers)
        stack = users_lines(self._height) if seen.phase != "backward" or seen.api_op else [seen.line][: self._height]
        finding = Finding(
            seen.op.name, seen.api_op or seen.forward_op, seen.module, seen.phase, tuple(filter(None, stack)),
            result_dtype(outputs), tuple(of_inputs), tuple(numbers), kind, cause, max(self.num_steps - 1, 0),
        )  # fmt: skip
        self._add(finding)

    def _notice_mask(self, seen: Seen) -> None:
        """Remember that infinities were put in among other values: `scores[mask] = -inf`."""
        with undisturbed(), self._lock:
            inputs = kept_inputs(seen)
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
            self._has_raised = True  # whoever handles the error may compute with what is bad
            raise NonFiniteError(str(finding), finding)

    def _is_beyond(self, numbers: TensorNumbers) -> bool:
        return self._mode >= DebugMode.CHECK_ALL_FOR_OVERFLOW and numbers.overflows_float16

    def _is_meant(
        self,
        seen: Seen,
        inputs: Sequence[tuple[str, Tensor]],
        of_inputs: Sequence[TensorNumbers],
        outputs: Sequence[tuple[str, Tensor]],
        numbers: Sequence[TensorNumbers],
    ) -> bool:
        """Whether what is not finite was put there on purpose, or flows on from what was."""
        has_nan = any(each.num_nan for each in numbers)
        if own := own_infinities(seen):
            self._has_masks = True
            return not has_nan or any(map(math.isnan, own))
        pairs = zip(inputs, of_inputs, strict=True)
        if any(is_mask(each) and not self._is_ours(tensor) for (_, tensor), each in pairs):
            self._has_masks = True
        if has_nan or self._culprit(inputs, of_inputs) is not None:
            return False
        if any(not each.is_finite for each in of_inputs):
            return self._has_masks
        # An in-place kernel has written over the input whose infinity flows on.
        return seen.op.is_in_place and any(tensor in self._meant for _, tensor in outputs)

    def _culprit(self, inputs: Sequence[tuple[str, Tensor]], of_inputs: Sequence[TensorNumbers]) -> int | None:
        """Return which input is bad and not meant to be."""
        for index, ((_, tensor), each) in enumerate(zip(inputs, of_inputs, strict=True)):
            if each.is_finite:
                continue
            if each.num_nan or not self._has_masks or self._is_ours(tensor):
                return index
        return None

    def _is_ours(self, tensor: Tensor) -> bool:
        """Whether a kernel that was seen made it, or a module stores it as a parameter: it is no mask."""
        return tensor in self._made_here or "parameter" in stored_as(tensor, modules_in_progress())

    def _explain(
        self,
        seen: Seen,
        inputs: Sequence[tuple[str, Tensor]],
        of_inputs: Sequence[TensorNumbers],
        outputs: Sequence[TensorNumbers],
    ) -> tuple[Kind, str]:
        if all(each.is_finite for each in outputs):
            largest = max(each.max_abs for each in outputs)
            return "would overflow", f"the largest value is {largest:.4g}, and float16 ends at {FLOAT16_MAX:.0f}"
        index = self._culprit(inputs, of_inputs)
        if index is None:
            return find_cause(seen, of_inputs, outputs)
        bad, stored = of_inputs[index], stored_as(inputs[index][1], modules_in_progress())
        if self._num_in_step and not stored:
            return "carried", f"input `{bad.name}` was not finite already: the origin is an earlier finding"
        return "outside", outside_cause(bad, stored)

    def _write(self, seen: Seen, numbers: Sequence[TensorNumbers]) -> None:
        for each in numbers:
            if self._mode is DebugMode.CHECK_ALL and len(self.checked) < MAX_CHECKED:
                self.checked.append(CheckedTensor(_op_name(seen), seen.module, seen.phase, self.num_steps - 1, each))
            if is_reported(each, self._mode):
                self._log.write(each.precision_line(_op_name(seen), _tensor_name(seen, each)), each.device)


def extremes(tensors: Sequence[Tensor]) -> tuple[bool, float]:
    """Return whether all values are finite, and the largest magnitude; one read."""
    pairs = [torch.stack(torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())) for tensor in tensors]
    joined = pairs[0] if len(pairs) == 1 else torch.cat([pair.to(pairs[0].device).double() for pair in pairs])
    values = [abs(value) for value in joined.tolist()]
    return all(value < float("inf") for value in values), max(values)  # NaN is not less


def _op_name(seen: Seen) -> str:
    if seen.cast is not None:
        return seen.op.name
    return seen.api_op or (f"{seen.forward_op}_grad" if seen.forward_op else seen.op.name)


def _tensor_name(seen: Seen, numbers: TensorNumbers) -> str:
    grad = "@GRAD" if seen.phase == "backward" and not seen.api_op else ""
    return f"{seen.module}{grad}{numbers.name.removeprefix('out')}"


# ------------------------------------------------------------------------------------------------- on and off


class _Active(threading.local):
    """What `enable_tensor_checker` has started in a thread."""

    checker: TensorChecker | None = None


_active = _Active()


def enable_tensor_checker(config: TensorCheckerConfig) -> TensorChecker:
    """Begin a step: check the kernels of this thread and of its backward, if the step is one of `config.debug_step`.

    Call it at the beginning of every step, and `disable_tensor_checker` at the end of the run. Another configuration
    takes the place of the one before, and counts its own steps.

    Returns:
        What the configuration has found up to now, the same object at each call.
    """
    disable_tensor_checker()
    (checker,) = config._checker
    if config.is_in_window(checker.begin_step()):
        _start(checker)
        _active.checker = checker
    return checker


def disable_tensor_checker() -> None:
    """Stop what `enable_tensor_checker` started in this thread; silent if nothing was started."""
    checker, _active.checker = _active.checker, None
    if checker is not None:
        _stop(checker)
        checker.close()


@contextmanager
def tensor_checker(config: TensorCheckerConfig | None = None) -> Iterator[TensorChecker]:
    """Check the kernels that run inside, as one step of a configuration; off afterwards, whatever happens.

    Args:
        config: What to look at; None: everything, and the first NaN or inf is a `NonFiniteError`.
    """
    with checking(TensorCheckerConfig() if config is None else config) as checker:
        yield checker


@contextmanager
def checking(config: TensorCheckerConfig, inside: nn.Module | None = None) -> Iterator[TensorChecker]:
    """Check one step of a configuration.

    Args:
        config: What to look at.
        inside: The module whose forward is in progress; paths are below it.
    """
    (checker,) = config._checker
    if not config.is_in_window(checker.begin_step()):
        yield checker
        return
    try:
        with listening(checker, inside=inside):
            yield checker
    finally:
        checker.close()
