"""Torch-level calls, as a function mode sees them, under the names that users and lists know."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch

from mezzo.amp import OPS, Classifier, Policy

numbers = itertools.count()

_BACKWARD_CALLS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_PLAIN_PROPERTIES = frozenset(
    "dtype device shape layout ndim grad grad_fn requires_grad is_leaf is_cuda is_cpu is_sparse is_sparse_csr is_meta "
    "is_quantized is_nested names itemsize nbytes _version _backward_hooks".split()
)
_PLAIN_METHODS = frozenset(
    "numel nelement dim ndimension size stride storage_offset element_size data_ptr get_device is_contiguous "
    "is_floating_point is_complex untyped_storage register_hook register_post_accumulate_grad_hook".split()
)
# Python functions around one operator of the same name: there is nothing more to record inside them.
_ONE_KERNEL = frozenset(
    "relu batch_norm layer_norm group_norm instance_norm hardswish hardsigmoid hardtanh silu mish elu selu celu leaky_relu "
    "dropout adaptive_avg_pool2d embedding softmax log_softmax".split()
)
# The two torch-level spellings that differ from the name users and lists know.
_API_NAMES = {"cross_entropy_loss": "cross_entropy", "rsub": "sub"}


@dataclass(frozen=True, slots=True)
class Named:
    """Facts about a torch-level function."""

    name: str
    """As users write it: `linear`, `add`, `sub` for `1 - x`; empty for backward, which is not an operator."""
    is_plain: bool
    """Whether it only reads or sets properties of a tensor and runs no kernel: the most frequent calls."""
    is_backward: bool
    body: Callable[..., Any] | None
    """To run with the mode on, so that its parts are recorded; None if it has none to record."""
    classify: Classifier | None
    """Returns the variant of a call."""


class Call:
    """One torch-level call in progress."""

    __slots__ = ("_number", "_variant", "args", "func", "in_backward", "kwargs", "name", "named", "policy", "reason")
    in_backward: bool

    def __init__(
        self,
        func: Any,
        named: Named,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outer: "Call | None",
        policy: Policy | None,
    ) -> None:
        self.func, self.named, self.args, self.kwargs = func, named, args, kwargs
        self.name = named.name
        self.in_backward = named.is_backward or (outer is not None and outer.in_backward)
        self.policy = policy
        self.reason: str | None = None
        self._variant: str | None = None
        self._number: int | None = None

    @property
    def number(self) -> int:
        """A number that no other call has."""
        if self._number is None:
            self._number = next(numbers)
        return self._number

    @property
    def variant(self) -> str:
        """The name by which the policy decides: the operator, or its variant (`sum.dim`)."""
        if self.named.classify is None:
            return self.name
        if self._variant is None:
            try:
                self._variant = self.named.classify(self.args, self.kwargs)
            except IndexError:  # it expects the arguments of a kernel; a user may give all of them by keyword
                self._variant = self.name
        return self._variant


@cache
def describe_call(func: Any) -> Named:
    """Return the facts about a torch-level function."""
    name = _name_of_call(func)
    op = OPS.get(name)
    return Named(
        name=name,
        is_plain=_is_plain(func),
        is_backward=func in _BACKWARD_CALLS,
        body=_visible_body(func),
        classify=None if op is None else op.classify,
    )


def _name_of_call(func: Any) -> str:
    if func in _BACKWARD_CALLS:
        return ""
    name = _name_of(func)
    if name in ("__get__", "__set__"):  # a property such as `x.mT`
        name = _name_of(func.__self__)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _API_NAMES.get(name, name)


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return name.split(".")[0]  # torch.ops.aten.add.Tensor is add.Tensor


def _is_plain(func: Any) -> bool:
    name = _name_of(func)
    if name in ("__get__", "__set__"):
        return _name_of(func.__self__) in _PLAIN_PROPERTIES
    return name in _PLAIN_METHODS


def _visible_body(func: Any) -> Callable[..., Any] | None:
    """Return a copy of a Python function of torch that does not check for overrides; None if it has no parts to record.

    Functions such as `F.cross_entropy` first check whether a mode is on and, if so, call it. Called from the mode, the
    original would recurse forever with the mode on, and hide its parts with the mode off.
    """
    if not isinstance(func, FunctionType) or not func.__module__.startswith("torch.") or _name_of(func) in _ONE_KERNEL:
        return None
    checks = {name: _no for name in _OVERRIDE_CHECKS if name in func.__code__.co_names and name in func.__globals__}
    if not checks:
        return None
    copy = FunctionType(
        func.__code__, {**func.__globals__, **checks}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
