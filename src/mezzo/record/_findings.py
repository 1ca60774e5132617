"""A kernel whose result is not finite: where it ran, its inputs and outputs, and whether the precision is the cause."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mezzo._torch.pytree import tree_leaves, tree_map
from mezzo.dtypes import HALF_DTYPES, HALF_NAMES, dtype_name
from mezzo.record._kernel_runs import KernelRun, Phase, floating
from mezzo.record._tensor_numbers import FLOAT16_MAX, TensorNumbers, measure

Kind = Literal["range", "rounding", "formula", "outside", "carried", "would overflow", "unknown"]
"""Why a result is not finite.

`range`: the true value is larger than the dtype holds. `rounding`: float32 has a result that the dtype would hold.
`formula`: float32 has none either. `outside`: an input was bad when it first appeared. `carried`: an input was reported
before. `would overflow`: finite, but more than float16 holds. `unknown`: the kernel could not be repeated.
"""

_PLAIN = (Tensor, nn.Parameter)
# They write checked values into memory that may be partly uninitialised.
MOVES = frozenset("index_put_ _index_put_impl_ index_copy_ index_fill_ scatter_ masked_scatter_ put_".split())
# Their other outputs are for their own backward: padding is uninitialised, and a masked row has no logarithm.
_ONLY_FIRST_OUTPUT = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "nll_loss")


@dataclass(frozen=True, slots=True)
class Finding:
    """A kernel with a result to report."""

    op: str
    """Kernel without overload: `addmm`, `_to_copy`; in a layer's own check of the backward, the autograd node."""
    api_op: str
    """Torch-level call that it belongs to; in the backward, the call whose gradient it computes; may be empty."""
    module: str
    phase: Phase
    stack: tuple[str, ...]
    """Lines of the user's code, `net.py:12`, the innermost first; in the backward the one line of the forward."""
    dtype: str
    """Of the result."""
    inputs: tuple[TensorNumbers, ...]
    """Floating inputs; those that the kernel overwrote are left out."""
    outputs: tuple[TensorNumbers, ...]
    kind: Kind
    cause: str
    step: int = 0
    """Step of the configuration, from 0."""

    @property
    def line(self) -> str:
        """The innermost line of the user's code; empty if there is none."""
        return self.stack[0] if self.stack else ""

    def __str__(self) -> str:
        """Return everything as one paragraph."""
        bad = [output for output in self.outputs if not output.is_finite]
        made = "more than float16 holds" if not bad else "NaN" if any(output.num_nan for output in bad) else "inf"
        call = f"`{self.api_op}`" if self.api_op else f"kernel `{self.op}`"
        if self.api_op and self.phase == "backward":
            call = f"the gradient of {call}"
        kernel = f" (kernel `{self.op}`)" if self.api_op not in ("", self.op) else ""
        module = f" in module `{self.module}`" if self.module else ""
        at = f" at {' < '.join(self.stack)}" if self.stack else ""
        inputs = "; ".join(map(str, self.inputs)) or "none that is floating, or written over"
        return (
            f"{made} from {call}{kernel}{module}, {self.phase}, {self.dtype}{at}. Output: "
            f"{'; '.join(map(str, self.outputs))}. Inputs: {inputs}. Cause: {self.cause}."
        )


# ------------------------------------------------------------------------------------------------- what a kernel has


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read: dense, with memory, not a subclass, no CUDA graph being captured."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def results(kernel: KernelRun) -> list[tuple[str, Tensor]]:
    """Return the floating outputs of a kernel, with names; the tensors it wrote to, if it returns none."""
    if kernel.op.name in MOVES:
        return []
    found = list(kernel.outputs()) or [tensor for _, tensor, is_written in _arguments(kernel) if is_written]
    if kernel.op.name.startswith(_ONLY_FIRST_OUTPUT) and kernel.phase == "forward":
        found = found[:1]
    names = ["out"] if len(found) == 1 else [f"out[{index}]" for index in range(len(found))]
    return [(name, tensor) for name, tensor in zip(names, found, strict=True) if readable(tensor)]


def kept_inputs(kernel: KernelRun) -> list[tuple[str, Tensor]]:
    """Return the floating inputs that a kernel did not write to, with the names of its arguments."""
    written = [tensor for _, tensor, is_written in _arguments(kernel) if is_written]
    return [
        (name, tensor)
        for name, tensor, is_written in _arguments(kernel)
        if not is_written and readable(tensor) and not any(tensor is other for other in written)
    ]


def _arguments(kernel: KernelRun) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the floating tensors among a kernel's arguments: name, tensor, whether the kernel writes to it."""
    schema = getattr(kernel.func, "_schema", None)
    declared = list(schema.arguments) if schema is not None else []
    given = [(declared[i] if i < len(declared) else None, value) for i, value in enumerate(kernel.args)]
    given += [(next((a for a in declared if a.name == name), None), value) for name, value in kernel.kwargs.items()]
    for index, (argument, value) in enumerate(given):
        name = argument.name if argument is not None else f"input {index}"
        is_written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        found = list(floating((value,)))
        for i, tensor in enumerate(found):
            yield (name if isinstance(value, Tensor) else f"{name}[{i}]"), tensor, is_written


def own_infinities(kernel: KernelRun) -> list[float]:
    """Return the Python numbers among a kernel's arguments that are inf or NaN: they are deliberate."""
    leaves = tree_leaves((list(kernel.args), kernel.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]


def is_mask(numbers: TensorNumbers) -> bool:
    """Whether infinities of a tensor from outside are deliberate: a constant, or a mask of only 0 and -inf."""
    is_constant = not numbers.shape
    is_zero_elsewhere = numbers.num_nonzero == 0 and numbers.num_positive_inf == 0
    return numbers.num_nan == 0 and numbers.num_inf > 0 and (is_constant or is_zero_elsewhere)


def stored_as(tensor: Tensor, modules: Sequence[nn.Module]) -> str:
    """Return whether a tensor, or its base, is a parameter or a buffer of the outermost module; '' if neither."""
    where = tensor.untyped_storage().data_ptr()
    for module in modules[:1]:
        for kind, owned in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, own in owned:
                if type(own) in _PLAIN and own.untyped_storage().data_ptr() == where:
                    return f"{kind} `{name}`"
    return "a parameter" if isinstance(tensor, nn.Parameter) else ""


# ------------------------------------------------------------------------------------------------- why it is bad


def find_cause(
    kernel: KernelRun, inputs: Sequence[TensorNumbers], outputs: Sequence[TensorNumbers]
) -> tuple[Kind, str]:
    """Return why a kernel with finite inputs, or with deliberate infinities, gave a bad result."""
    bad = next(output for output in outputs if not output.is_finite)
    if any(not numbers.is_finite for numbers in inputs):
        return "formula", (
            "not the precision: infinities among the inputs, put there on purpose, met each other or a zero (a softmax "
            "over nothing but -inf, inf - inf, 0 * inf)"
        )
    limit = _largest(bad.dtype)
    if kernel.cast is not None and inputs and inputs[-1].max_abs > limit:
        return "range", _range_text(
            kernel, bad.dtype, inputs[-1].max_abs, f"the {inputs[-1].dtype} value it was cast from"
        )
    if bad.dtype not in HALF_NAMES and not any(numbers.dtype in HALF_NAMES for numbers in inputs):
        if kernel.op.is_in_place:
            return "unknown", "the kernel wrote over its input, so what it had is not known"
        return "formula", f"not the precision: the kernel computed in {bad.dtype}, from finite inputs"
    if kernel.op.is_in_place:
        return "unknown", "the kernel wrote over its input, so it cannot be repeated in float32"
    again = _in_float32(kernel)
    if again is None:
        return "unknown", "the kernel draws random numbers or knows no float32, so it was not repeated in float32"
    if not all(numbers.is_finite for numbers in again):
        return "formula", "not the precision: in float32 the same inputs do not give a finite result either"
    largest = max((numbers.max_abs for numbers in again), default=0.0)
    if largest > limit:
        return "range", _range_text(kernel, bad.dtype, largest, "in float32 the largest value")
    return "rounding", f"rounding inside the kernel in {bad.dtype}: in float32 the largest value is {largest:.4g}"


def _range_text(kernel: KernelRun, dtype: str, largest: float, what: str) -> str:
    text = f"{dtype}'s range: {what} is {largest:.4g} ({dtype} ends at {_largest(dtype):.5g})"
    if kernel.phase != "backward" or dtype != "float16":
        return text
    smaller = 2 ** math.ceil(math.log2(largest / FLOAT16_MAX))
    return f"{text}; gradients are multiplied by the loss scale, and with one {smaller} times smaller it would fit"


def _largest(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).max)


def _in_float32(kernel: KernelRun) -> list[TensorNumbers] | None:
    """Repeat a kernel with its inputs in float32 and return the numbers; None if it cannot be repeated."""
    if torch.Tag.nondeterministic_seeded in getattr(kernel.func, "tags", ()):  # do not use up random numbers
        return None
    args, kwargs = tree_map(_raised, (list(kernel.args), dict(kernel.kwargs)))
    try:
        out = kernel.func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return measure([("out", tensor) for tensor in floating((out,)) if readable(tensor)])


def _raised(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF_DTYPES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF_DTYPES else value


def outside_cause(bad: TensorNumbers, stored: str) -> str:
    """Return the cause for an input that was bad when it first appeared."""
    what = stored or "data, or the result of a kernel that was not checked"
    return f"input `{bad.name}` came from outside and was not finite when it first appeared: {what}"


def result_dtype(outputs: Sequence[tuple[str, Tensor]]) -> str:
    """Return the dtype of a kernel's first result."""
    return dtype_name(outputs[0][1].dtype)
