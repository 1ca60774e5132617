"""One kernel that has run, as a recording hands it to whoever listens: what, where, why, and from which line."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mezzo.fp8 import FP8_LINEAR, FP8_LINEAR_BACKWARD

Phase = Literal["forward", "backward", "optimizer"]

EXCLUDED = "excluded layer"
"""The reason of whatever runs in a module that is kept in float32."""

# Not views by their schema, yet they compute nothing: they allocate, or give a tensor another shape or storage.
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "resize_", "set_"}
)
_RANGES = {"profiler::_record_function_enter_new": 1, "profiler::_record_function_exit": -1}
_CASTS = {"_to_copy": 0, "copy_": 1}  # with the position of what they copy
_HOLD_NO_TENSOR = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True)
class KernelOp:
    """What a recording needs to know of a dispatcher operator."""

    name: str
    """Without overload: `addmm`; operators outside aten keep their namespace."""
    has_tensors: bool
    computes: bool
    """False for views and allocations."""
    is_in_place: bool
    range: int
    """+1 opens and -1 closes a profiler range, 0 is any other operator."""
    is_fp8: bool = False
    """Whether it converts its half operands to FP8 and multiplies those."""
    cast_source: int = -1
    """Position of the argument that it copies into another dtype, where the two differ; -1: it is no copy."""


@cache
def describe_op(func: Any) -> KernelOp:
    """Return what is to be known of a dispatcher operator, or of a higher-order one."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return KernelOp(name=func.name(), has_tensors=True, computes=True, is_in_place=False, range=0)
    name = schema.name.removeprefix("aten::")
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    is_view = any(not a.is_write for a in aliases) and any(r.alias_info is not None for r in schema.returns)
    is_view = is_view or torch.Tag.inplace_view in func.tags or name in _ALLOCATIONS
    return KernelOp(
        name=name,
        has_tensors="Tensor" in str(schema),
        computes=not is_view,
        is_in_place=any(a.is_write for a in aliases),
        range=_RANGES.get(name, 0),
        is_fp8=name in (FP8_LINEAR, FP8_LINEAR_BACKWARD),
        cast_source=_CASTS.get(name, -1),
    )


@dataclass(slots=True)
class KernelRun:
    """A kernel that has run."""

    op: KernelOp
    func: Any
    """The dispatcher operator; called with other arguments inside of `KernelListener.see`, it is not recorded."""
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any
    phase: Phase
    module: str
    """Path below the outermost module that was called, in the backward too; empty for that module itself and outside."""
    api_op: str
    """Torch-level call under which it ran (`linear` for `addmm`); empty where the autograd engine ran it."""
    reason: str
    """What the policy says about `api_op` for the dtypes it was called with."""
    line: str = ""
    """The user's line, `net.py:12`, if a listener wants lines: of the forward, also for a kernel of the backward."""
    call: int = -1
    """Number of the torch-level call: two kernels with the same one belong together."""
    number: int = -1
    """Of the range in the profile, where one is taken."""
    seconds: float = 0.0
    """The host's time in the kernel, where it is measured."""
    variant: str = ""
    """What the policy knows `api_op` by: its name, or which of the things it does (`sum.dim`)."""
    forward_op: str = ""
    """Torch-level call whose gradient the kernel computes; empty outside of the backward, and where it is not known."""

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """What was copied into what, where the kernel turns one floating dtype into another; else None."""
        return cast_of(self.op, self.args, self.kwargs, self.out) if self.op.cast_source >= 0 else None

    def inputs(self) -> Iterator[Tensor]:
        """Yield the floating tensors that the kernel got."""
        return floating((*self.args, *self.kwargs.values()))

    def outputs(self) -> Iterator[Tensor]:
        """Yield the floating tensors that it returned."""
        return floating((self.out,))


class KernelListener(Protocol):
    """Whoever listens to a recording. What it computes itself is not recorded."""

    wants_lines: bool
    """Whether the user's lines are to be looked for."""
    wants_times: bool
    """Whether kernels are to be timed and numbered."""

    def wants(self, op: KernelOp) -> bool:
        """Whether kernels of an operator are to be shown."""

    def receive(self, kernel: KernelRun) -> None:
        """Take note of a kernel; autograd threads call it too."""


def find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples among them."""
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind in _HOLD_NO_TENSOR:  # most arguments, and told in a third of the time of `isinstance`
            continue
        if kind is Tensor or kind is nn.Parameter or isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)) and not _HOLD_NO_TENSOR.issuperset(map(type, value)):
            found += find_tensors(value)
    return found


def cast_of(op: KernelOp, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[Tensor, Tensor] | None:
    """Return source and target of a kernel that copies, where it turns one floating dtype into another; else None."""
    # a graph may give it by keyword
    source = args[op.cast_source] if op.cast_source < len(args) else next(reversed(find_tensors(kwargs.values())), None)
    if not isinstance(source, Tensor) or not isinstance(out, Tensor):
        return None
    before, after = source.dtype, out.dtype
    is_cast = before is not after and before.is_floating_point and after.is_floating_point
    return (source, out) if is_cast else None


def floating(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the floating tensors among values."""
    return (tensor for tensor in find_tensors(values) if tensor.dtype.is_floating_point)
