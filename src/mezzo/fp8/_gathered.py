"""Weights that FSDP2 gathered in FP8: half for autograd, FP8 in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from mezzo._torch.pytree import tree_map
from mezzo._torch.wrapper_tensors import make_wrapper, no_function_rules
from mezzo.fp8._operands import Operand, turn_operand

_aten = torch.ops.aten


class GatheredWeight(Tensor):
    """A weight in FP8 with the dtype of a half weight.

    FP8 products use the FP8 numbers. Every other operator gets these numbers as a half tensor: the half
    weight itself was not gathered.
    """

    numbers: Tensor
    """[outputs, inputs], e4m3."""
    inverse_scale: Tensor
    """Inverse scale, one number."""

    __torch_function__ = no_function_rules

    @staticmethod
    def __new__(
        cls: type[GatheredWeight], numbers: Tensor, inverse_scale: Tensor, dtype: torch.dtype
    ) -> GatheredWeight:
        made: GatheredWeight = make_wrapper(cls, numbers.shape, dtype=dtype, device=numbers.device)
        made.numbers, made.inverse_scale = numbers, inverse_scale
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # printing must not warn
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, device={self.device})"

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_to_write("weight[...] = ...")  # torch would write to a view, which is a half copy here

    def operand(self, *, transposed: bool) -> Operand:
        """Return the operand of a product, in one of its layouts."""
        nothing = self.numbers.new_empty(0)
        return Operand(
            values=nothing if transposed else self.numbers,
            inverse=self.inverse_scale,
            transposed=turn_operand(self.numbers, self.inverse_scale, None) if transposed else nothing,
            transposed_inverse=self.inverse_scale,
        )

    def to_half(self) -> Tensor:
        """Return the FP8 numbers in half; exact except for float16 numbers below its normal range."""
        return (self.numbers.float() * self.inverse_scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> GatheredWeight:
        return GatheredWeight(inner["numbers"], inner["inverse_scale"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """Return what a compiled graph on disk depends on; torch 2.13 and newer warn without it."""
        return f"GatheredWeight {tuple(self.shape)} {self.dtype} {self.device.type}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _rules.get(func)
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        if func._schema.is_mutable and any(isinstance(each, GatheredWeight) for each in _written(func, args, kwargs)):
            _refuse_to_write(str(func))
        if func not in _SHAPE_ONLY:
            warn_of_half_use(f"{func} is not a product in FP8 (or runs outside of autocast())")
        args, kwargs = tree_map(_widen, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Any]:
    """Yield the tensors that an operator writes to: in place, or as `out`."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _refuse_to_write(call: str) -> NoReturn:
    raise RuntimeError(
        f"{call} would write to a weight that was gathered in FP8; call reshard() on its module, and change the weight then"
    )


def _widen(value: Any) -> Any:
    return value.to_half() if isinstance(value, GatheredWeight) else value


def _same(weight: GatheredWeight, *_: Any, **__: Any) -> GatheredWeight:
    return GatheredWeight(weight.numbers, weight.inverse_scale, weight.dtype)


def _strided(weight: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """Return a view: FSDP asks for one of the same shape."""
    if tuple(size) == tuple(weight.shape) and tuple(stride) == tuple(weight.stride()) and not offset:
        return _same(weight)
    return torch.as_strided(weight.to_half(), size, stride, offset)


_rules: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.as_strided.default: _strided,
    _aten.record_stream.default: lambda weight, stream: weight.numbers.record_stream(stream),
}
_SHAPE_ONLY = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
}
"""Operators that do not read the numbers."""


def add_rule(operator: Any, rule: Callable[..., Any]) -> None:
    """Let a function compute an operator on gathered weights."""
    _rules[operator] = rule


_has_warned = False


def warn_of_half_use(reason: str) -> None:
    """Warn once that the FP8 numbers of a weight are used in place of its half numbers."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"shard(gather_fp8=True): {reason}, so it uses the FP8 numbers of a weight, not its half numbers; name its "
            "layer in half_layers, or shard without gather_fp8",
            UserWarning,
            stacklevel=2,
        )
