"""What the tensor checker looks at: steps, operators, and what happens with a finding."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from mezzo.amp import OPS, VARIANTS, resolve_list, resolve_name
from mezzo.errors import unknown_choice
from mezzo.record._kernel_runs import KernelRun
from mezzo.record._tensor_numbers import DebugMode


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class TensorCheckerConfig:
    """What the tensor checker checks, and what it does with findings.

    Args:
        enable: Whether to check at all.
        debug_mode: What to look for, and what to do with it.
        output_dir: Folder for the lines, appended to one file per device and process; None: they are printed.
        checked_op_list: Only these operators; names as in operator lists, so Paddle's work too. None: all, or those of
            `set_checked_op_list`.
        skipped_op_list: Operators that are not checked. None: none, or those of `set_skipped_op_list`.
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
    selection: "Selection" = field(init=False, repr=False)
    """Which kernels the operator lists choose."""

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
        object.__setattr__(self, "selection", Selection(self))

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


class Selection:
    """Which kernels are looked at, by the operator lists of a configuration, or else by those of the process."""

    def __init__(self, config: TensorCheckerConfig) -> None:
        self._checked = _variants("checked_op_list", config.checked_op_list)
        self._skipped = _variants("skipped_op_list", config.skipped_op_list)

    def includes(self, kernel: KernelRun) -> bool:
        checked = self._checked if self._checked is not None else _of_process["checked_op_list"]
        skipped = self._skipped if self._skipped is not None else _of_process["skipped_op_list"]
        if checked is None and not skipped:
            return True
        variants = _variants_of(kernel)
        return not (skipped and variants & skipped) and (checked is None or bool(variants & checked))


_of_process: dict[str, frozenset[str] | None] = {"checked_op_list": None, "skipped_op_list": None}
"""For configurations that do not have such a list."""


def set_checked_op_list(checked_op_list: Sequence[str] | None) -> None:
    """Check only these operators, with every configuration that has no `checked_op_list` of its own.

    Args:
        checked_op_list: As in `TensorCheckerConfig`; None: all operators again.
    """
    _of_process["checked_op_list"] = _variants("checked_op_list", checked_op_list)


def set_skipped_op_list(skipped_op_list: Sequence[str] | None) -> None:
    """Do not check these operators, with every configuration that has no `skipped_op_list` of its own.

    Args:
        skipped_op_list: As in `TensorCheckerConfig`; None: skip nothing.
    """
    _of_process["skipped_op_list"] = _variants("skipped_op_list", skipped_op_list)


def _variants(argument: str, names: Sequence[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset().union(*resolve_list(names, argument).values())


def _variants_of(kernel: KernelRun) -> frozenset[str]:
    """Return the variants of a kernel: those of its call, of the call whose gradient it computes, and its own."""
    own: str = kernel.op.name
    listed = OPS.get(own)
    if listed is not None and listed.classify is not None:
        own = listed.classify(kernel.args, kernel.kwargs)
    return frozenset().union(*(_meaning(name) for name in (kernel.variant, kernel.forward_op, own)))


@functools.cache
def _meaning(name: str) -> frozenset[str]:
    """Return the variants of an operator name, not of a group: `matmul` means only `matmul`."""
    if name in VARIANTS:
        return frozenset({name})
    if name in OPS:
        return frozenset(OPS[name].variants)
    try:
        return resolve_name(name)
    except ValueError:
        return frozenset()
