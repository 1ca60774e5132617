"""One kernel that has run, as a recording passes it to listeners: what, where, why, and from which line."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mezzo.fp8 import FP8_LINEAR, FP8_LINEAR_BACKWARD

Phase = Literal["forward", "backward", "optimizer"]

EXCLUDED = "excluded layer"
"""The reason of kernels in a module that is kept in float32."""

# Not views by their schema, but they compute nothing: they allocate, or change shape or storage of a tensor.
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "resize_", "set_"}
)
_RANGES = {"profiler::_record_function_enter_new": 1, "profiler::_record_function_exit": -1}
_CASTS = {"_to_copy": 0, "copy_": 1}  # with the position of the source
_HOLD_NO_TENSOR = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


@dataclass(frozen=True, slots=True)
class KernelOp:
    """What a recording needs to know about a dispatcher operator."""

    name: str
    """Without overload: `addmm`; operators outside aten keep their namespace."""
    has_tensors: bool
    computes: bool
    """False for views and allocations."""
    is_in_place: bool
    range: int
    """+1 opens and -1 closes a profiler range, 0 is any other operator."""
    is_fp8: bool = False
    """Whether it converts its half operands to FP8 and multiplies them."""
    cast_source: int = -1
    """Position of the argument that it copies, perhaps into another dtype; -1 if it is not a copy."""


@cache
def describe_op(func: Any) -> KernelOp:
    """Return the facts about a dispatcher operator, or a higher-order one."""
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
    """The dispatcher operator; calls of it inside `KernelListener.receive` are not recorded."""
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any
    phase: Phase
    module: str
    """Path below the outermost module that was called, also in the backward; empty for that module and outside."""
    api_op: str
    """Torch-level call under which it ran (`linear` for `addmm`); empty if the autograd engine ran it."""
    reason: str
    """The policy's reason for `api_op` with these input dtypes."""
    line: str = ""
    """The user's line, `net.py:12`, if a listener wants lines; for kernels of the backward, the line of the forward."""
    call: int = -1
    """Number of the torch-level call; kernels with the same number belong together."""
    number: int = -1
    """Number of the range in the profile, if there is one."""
    seconds: float = 0.0
    """Host time of the kernel, if it is measured."""
    variant: str = ""
    """The variant of `api_op` (`sum.dim`), by which the policy decides."""
    forward_op: str = ""
    """Torch-level call whose gradient the kernel computes; empty in the forward, and if it is unknown."""

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """Source and target, if the kernel casts one floating dtype to another; otherwise None."""
        return cast_of(self.op, self.args, self.kwargs, self.out) if self.op.cast_source >= 0 else None

    def inputs(self) -> Iterator[Tensor]:
        """Yield the floating input tensors."""
        return floating((*self.args, *self.kwargs.values()))

    def outputs(self) -> Iterator[Tensor]:
        """Yield the floating output tensors."""
        return floating((self.out,))


class KernelListener(Protocol):
    """Receives the kernels of a recording. Its own kernels are not recorded."""

    wants_lines: bool
    """Whether it needs the user's lines."""
    wants_times: bool
    """Whether it needs kernels to be timed and numbered."""

    def wants(self, op: KernelOp) -> bool:
        """Whether it wants the kernels of an operator."""

    def receive(self, kernel: KernelRun) -> None:
        """Receive a kernel; autograd threads also call this."""


def find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, also inside lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind in _HOLD_NO_TENSOR:  # most arguments; three times as fast as `isinstance`
            continue
        if kind is Tensor or kind is nn.Parameter or isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)) and not _HOLD_NO_TENSOR.issuperset(map(type, value)):
            found += find_tensors(value)
    return found


def cast_of(op: KernelOp, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> tuple[Tensor, Tensor] | None:
    """Return source and target of a copying kernel, if it casts one floating dtype to another; otherwise None."""
    # in a graph it may be a keyword argument
    source = args[op.cast_source] if op.cast_source < len(args) else next(reversed(find_tensors(kwargs.values())), None)
    if not isinstance(source, Tensor) or not isinstance(out, Tensor):
        return None
    before, after = source.dtype, out.dtype
    is_cast = before is not after and before.is_floating_point and after.is_floating_point
    return (source, out) if is_cast else None


def floating(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the floating tensors among values."""
    return (tensor for tensor in find_tensors(values) if tensor.dtype.is_floating_point)
