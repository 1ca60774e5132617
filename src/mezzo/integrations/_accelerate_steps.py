"""What `MezzoAccelerator` makes of models and optimizers: a forward in the region, steps by `Precision`."""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from mezzo.amp import GradScaler
from mezzo.precision import Precision

_MARK = "_mezzo_runs_in_region"
_TRAINS = "_mezzo_prepared_to_train"


class StepOutcomes:
    """Which of the steps were skipped; the host waits for the device only if it must know."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = None if scaler is None else weakref.proxy(scaler)
        self._taken = self._arrived = 0
        self._skipped: set[int] = set()
        if scaler is not None:
            scaler.register_outcome_hook(self._note)

    def _note(self, taken: bool) -> None:
        self._arrived += 1
        if not taken:
            self._skipped.add(self._arrived)

    def number_step(self) -> int:
        """Return the number of a step that was just taken."""
        self._taken += 1
        return self._taken

    def was_skipped(self, number: int) -> bool:
        """Whether the step of this number was skipped."""
        if self._scaler is None:
            return False
        if number > self._arrived:
            self._scaler.flush()
        return number in self._skipped

    def settle(self) -> None:
        """Wait for all outcomes; a state that is loaded next must not lose any."""
        if self._scaler is not None:
            self._scaler.flush()


_outcomes: weakref.WeakKeyDictionary[GradScaler, StepOutcomes] = weakref.WeakKeyDictionary()


def outcomes_of(scaler: GradScaler | None) -> StepOutcomes:
    """Return the outcomes of a scaler: one object for all accelerators that share it, since they count its steps."""
    if scaler is None:
        return StepOutcomes(None)
    if scaler not in _outcomes:
        _outcomes[scaler] = StepOutcomes(scaler)
    return _outcomes[scaler]


class MezzoOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer wrapper, stepped by `Precision.step`; `MezzoAccelerator` makes it."""

    precision: Precision
    outcomes: StepOutcomes
    _last_step = 0

    def step(self, closure: Any = None) -> None:
        """Take a step, unless gradients accumulate.

        Raises:
            RuntimeError: A closure was given while the loss is scaled.
        """
        if not self.gradient_state.sync_gradients:
            return
        if closure is not None:
            if self.precision.scaler is not None:
                raise RuntimeError("step() takes no closure with a loss scale: call accelerator.backward(loss) before")
            self.optimizer.step(closure)
            return
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        has_grads = any(param.grad is not None for param in params)
        self.precision.step(self.optimizer)
        self._last_step = self.outcomes.number_step() if has_grads else 0

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step found an overflow; waits for the device if the loss is scaled."""
        return self.outcomes.was_skipped(self._last_step)


def is_prepared(model: nn.Module) -> bool:
    """Whether this module was prepared to train and has the same dtypes since; its wrappers do not count."""
    return vars(model).get(_TRAINS) == _dtypes(model)


def note_prepared(model: nn.Module) -> None:
    """Note that a module was prepared to train."""
    vars(model)[_TRAINS] = _dtypes(model)  # setattr() of a compiled module would mark the module inside of it


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    return [param.dtype for param in model.parameters()]


def run_in_region(model: nn.Module, precision: Precision, *, float32_outputs: bool) -> None:
    """Let `model(...)`, and what calls it such as `generate`, run inside the region; a second call does nothing.

    The module's own `forward` is replaced, as Accelerate does: hooks would not keep its signature.
    """
    if _MARK in vars(model):
        return
    given: Any = model.forward
    function = getattr(given, "__func__", None)  # a compiled module has a plain function
    forward = _in_region(precision, given if function is None else function)
    if float32_outputs:
        forward = functools.wraps(forward)(convert_outputs_to_fp32(forward))
    model.forward = forward if function is None else MethodType(forward, model)  # type: ignore[method-assign]
    vars(model)[_MARK] = True


def _in_region(precision: Precision, forward: Any) -> Any:
    """Return `forward` inside the region.

    In a compiled function a region breaks the graph, so it is opened there only if none is open around the function.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_open = precision.policy is None or torch.is_autocast_enabled("cpu")  # a region enables all devices
        if torch.compiler.is_compiling() and is_open:
            return forward(*args, **kwargs)
        with precision.autocast():
            return forward(*args, **kwargs)

    return run
