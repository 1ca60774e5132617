"""Tries a call on fake tensors, to learn whether it is valid and the shapes of its results."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mezzo._torch.dynamo import kept_out
from mezzo._torch.fake_tensors import FakeTensorMode, no_report_of_misfits
from mezzo._torch.pytree import tree_leaves
from mezzo.amp import auto_cast
from mezzo.static._region import guards_entered, is_inside_guard
from mezzo.static._variables import TRIALS, InputSpec, ProgramError, modules_unwatched, values_of


@dataclass(slots=True)
class Use:
    """Where a parameter is used while the program is written."""

    inside: bool = False
    outside: bool = False


class _Watch(TorchFunctionMode):
    """Notes which parameters are used inside `fp16_guard` and which outside."""

    def __init__(self, uses: dict[nn.Parameter, Use]) -> None:
        super().__init__()
        self._uses = uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, nn.Parameter):
                use = self._uses.setdefault(value, Use())
                if is_inside_guard():
                    use.inside = True
                else:
                    use.outside = True
        return func(*args, **(kwargs or {}))


class Trials:
    """Tries the calls of a program, and notes where each parameter is used."""

    def __init__(self) -> None:
        self.uses: dict[nn.Parameter, Use] = {}
        self.has_guard = False
        """Whether anything ran inside `fp16_guard`."""
        self._fake: Any = None

    def parameters_outside_guard(self) -> set[nn.Parameter]:
        """Return the parameters that are used outside `fp16_guard` somewhere."""
        return {param for param, use in self.uses.items() if use.outside}

    def inputs(self, spec: InputSpec) -> tuple[Tensor, ...]:
        """Return the fake tensors of an input, one per trial."""
        with self._without_memory():
            return tuple(
                torch.empty([unknown if size < 0 else size for size in spec.shape], dtype=spec.dtype)
                for unknown in TRIALS
            )

    def results(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> tuple[Any, ...]:
        """Run a call on fake tensors, once per trial; return its results.

        Raises:
            ProgramError: The call does not take these variables, or reads their values.
        """
        function = getattr(Tensor, target) if isinstance(target, str) else target
        _refuse_lazy(target)
        before = guards_entered()
        results = []
        for trial, size in enumerate(TRIALS):
            values, named_values = values_of((tuple(args), kwargs), trial)
            try:
                with self._trial_of(target):
                    results.append(function(*values, **named_values))
            except Exception as error:  # the user's network may raise anything
                raise _explained(error, name, size) from error
        self.has_guard = self.has_guard or guards_entered() > before
        return tuple(results)

    @contextmanager
    def _trial_of(self, target: Any) -> Iterator[None]:
        """Make calls inside run on fake tensors and without side effects."""
        with ExitStack() as stack:
            stack.enter_context(modules_unwatched())
            stack.enter_context(kept_out())
            stack.enter_context(_untouched(target))
            stack.enter_context(no_report_of_misfits())
            stack.enter_context(_no_word_about_frames())
            stack.enter_context(self._without_memory())
            stack.enter_context(_Watch(self.uses))
            stack.enter_context(torch.no_grad())
            stack.enter_context(auto_cast(enable=False))  # precision is decided when the program runs
            yield

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        if self._fake is None:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self._fake:
            yield


def _explained(error: Exception, name: str, size: int) -> ProgramError:
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return ProgramError(
            f"{name} reads numbers ({error}), and a Variable has none while the program is written: what it does must not "
            "depend on them"
        )
    first = next(iter(str(error).splitlines()), type(error).__name__).replace(str(size), "-1")
    return ProgramError(f"{name} does not take these variables: {first}")


def _refuse_lazy(target: Any) -> None:
    if isinstance(target, nn.Module) and any(is_lazy(p) for p in (*target.parameters(), *target.buffers())):
        raise ProgramError(
            f"{type(target).__name__} has parameters without a shape (a lazy module): run it once, then write"
        )


@contextmanager
def _no_word_about_frames() -> Iterator[None]:
    """Inside, torch 2.12 does not warn that a captured module is not compiled: on fake tensors it must not be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile with fullgraph=True found no compiled frames")
        yield


@contextmanager
def _untouched(target: Any) -> Iterator[None]:
    """Restore attributes, buffers and one-element counters of a module after a trial."""
    parts = list(target.modules()) if isinstance(target, nn.Module) else []
    buffers = [
        buffer for part in parts for buffer in part._buffers.values() if buffer is not None and buffer.numel() == 1
    ]
    counters = [(buffer, buffer.clone()) for buffer in buffers]
    before = [(part, dict(part.__dict__), dict(part._buffers)) for part in parts]
    try:
        yield
    finally:
        for part, attributes, own in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(own)
        for buffer, value in counters:
            buffer.data.copy_(value)
