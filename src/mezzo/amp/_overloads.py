"""The overloads of an operator that autocast sees, and where the tensors of a call are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor

from mezzo._torch.dispatcher import BINDINGS, all_operator_names
from mezzo.amp._ops import WITH_NUMBERS, Op

_NOT_CAST = ("running_mean", "running_var", "index", "indices", "offsets", "mask", "condition")
"""Arguments that are never cast: statistics, which the operator writes in place, and integers or booleans."""

_registered: set[str] = set()


def overloads_of(op: Op) -> Iterator[Any]:
    """Yield the functional overloads that take part in autocast: without `out=`, without a result dtype."""
    packet = getattr(torch.ops.aten, op.name, None)
    for name in packet.overloads() if packet is not None else ():
        overload = getattr(packet, name)
        if qualified(overload) not in _registered_names() or name in ("dtype", "quantized"):
            continue
        arguments = overload._schema.arguments
        if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
            continue
        if any("Dimname" in str(a.type) for a in arguments) or not any("Tensor" in str(a.type) for a in arguments):
            continue
        yield overload


def qualified(overload: Any) -> str:
    """Return the dispatcher's name of an overload, such as `aten::sum.dim_IntList`."""
    name: str = overload._schema.name
    return f"{name}.{overload._schema.overload_name}" if overload._schema.overload_name else name


def _registered_names() -> set[str]:
    """Return the dispatcher's operators. Some packets also list overloads that exist for TorchScript only."""
    if not _registered:
        _registered.update(all_operator_names())
    return _registered


class Signature:
    """Where the tensors of an overload are, and where a caller may name the result dtype."""

    def __init__(self, overload: Any) -> None:
        arguments = overload._schema.arguments
        positional = [a for a in arguments if not a.kwarg_only]
        self.slots = tuple(i for i, a in enumerate(positional) if "Tensor" in str(a.type) and a.name not in _NOT_CAST)
        plain = all(str(positional[slot].type) == "Tensor" for slot in self.slots)
        self.only_slot = self.slots[0] if plain and len(self.slots) == 1 else None
        self.pick = itemgetter(*self.slots) if plain and len(self.slots) > 1 else None
        """Returns all tensors of a call at once; None if one of them may be missing."""
        self.takes_dtype = any(a.name == "dtype" for a in arguments)
        self._dtype_slot = next((i for i, a in enumerate(positional) if a.name == "dtype"), len(arguments))

    def dtypes(self, args: Sequence[Any], spare_scalars: bool) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the tensors of a call; `spare_scalars` leaves out 0-dim ones.

        In a list of tensors (the weights of an RNN) a run of equal dtypes counts once.
        """
        found = []
        count = len(args)
        for slot in self.slots:
            if slot >= count:
                break
            value = args[slot]
            if value is None:
                continue
            if type(value) in (list, tuple):  # first, because isinstance(value, Tensor) is slow if it is False
                last = None
                for item in value:
                    if item is not None and item.dtype is not last and not (spare_scalars and item.dim() == 0):
                        last = item.dtype
                        found.append(last)
            elif isinstance(value, Tensor) and (not spare_scalars or value.dim()):
                found.append(value.dtype)
        return tuple(found)

    def asks_for_dtype(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the caller named the dtype of the result: then the policy does not decide."""
        given = args[self._dtype_slot] if len(args) > self._dtype_slot else kwargs.get("dtype")
        return given is not None


def callable_of(overload: Any, op: Op) -> Callable[..., Any]:
    """Return torch's Python binding if it takes the same arguments: calling it takes half the time."""
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    # The binding has `alpha` as a keyword only, and another default `reduction`.
    if "alpha" in names or "reduction" in names:
        return cast(Callable[..., Any], overload)
    for home in BINDINGS:
        if hasattr(home, op.name):
            return cast(Callable[..., Any], getattr(home, op.name))
    return cast(Callable[..., Any], overload)


def has_numbers(op: Op) -> bool:
    """Whether a number among the arguments may be a 0-dim CPU tensor beside a CUDA one."""
    return op.name in WITH_NUMBERS and torch.cuda.is_available()


def is_decided_by_dtypes(op: Op, device_type: str) -> bool:
    """Whether the decision for a call depends on the dtypes of its tensors only."""
    return op.classify is None and not (device_type == "cpu" and has_numbers(op))
