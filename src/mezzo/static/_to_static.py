"""`to_static`: captures a module or function at its call, in the precision around the call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from mezzo._torch.module_calls import compiled_call, plain_call, set_compiled_call
from mezzo.record import OperatorStats
from mezzo.static._graph import Capture, CapturedGraph
from mezzo.static._region import CastRules
from mezzo.static._variables import InputSpec, ProgramError

_MOST_INPUTS = 64

T = TypeVar("T", bound=Callable[..., Any])


class StaticFunction:
    """A function that is captured as a graph, once for each policy and each kind of input."""

    def __init__(self, function: Callable[..., Any], input_spec: Sequence[InputSpec] | None, backend: str) -> None:
        self._capture = Capture(CastRules(), backend)
        self._function = self._capture.compile(function, dynamic=None)
        self._specs = tuple(input_spec or ())
        self._declared = _declared(function) if self._specs else []
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the captured function; gradients flow as through the function itself."""
        if self._specs:
            args, kwargs = self._fit(args, kwargs)
        return self._function(*args, **kwargs)

    def _fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check and cast the declared inputs, given by position or by name."""
        values = list(args)
        for spec, (place, name) in zip(self._specs, self._declared, strict=False):
            if place < len(values):
                values[place] = _fitted(spec, values[place])
            elif name in kwargs:
                kwargs = {**kwargs, name: _fitted(spec, kwargs[name])}
        return tuple(values), kwargs

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs captured so far."""
        return list(self._capture.graphs)

    def operators(self, include_views: bool = False) -> OperatorStats:
        """Return the operator table of the last captured graph.

        Raises:
            ProgramError: Nothing is captured yet.
        """
        if not self.graphs:
            raise ProgramError("no graph was captured yet: call the function once")
        return self.graphs[-1].operators(include_views)


def _declared(function: Callable[..., Any]) -> list[tuple[int, str]]:
    """Return position and name of a function's parameters without `self`."""
    module = getattr(function, "__self__", None)
    asked = module.forward if isinstance(module, nn.Module) else function
    try:
        names = list(inspect.signature(asked).parameters)
    except ValueError:  # a C function, which takes its inputs by position
        return [(place, "") for place in range(_MOST_INPUTS)]
    return [(i, name) for i, name in enumerate(names) if name != "self"]


def _fitted(spec: InputSpec, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not spec.fits(value.shape):
        raise ProgramError(
            f"{spec.name or 'the input'} has shape {list(value.shape)}; it was declared as {list(spec.shape)}"
        )
    return value.to(spec.dtype)


class _FunctionOrMethod(StaticFunction):
    """A captured function; of a class, it is a method."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the bound method, if `to_static` decorates a method."""
        return self if instance is None else functools.partial(self, instance)


class _ForwardOfModule(StaticFunction):
    """The captured call of a module; with `only_training`, the plain call in evaluation.

    It has no `__get__`: the module's attribute that holds it is no method, but Dynamo of torch 2.11 would bind it as one.
    """

    def __init__(
        self, module: nn.Module, input_spec: Sequence[InputSpec] | None, backend: str, only_training: bool
    ) -> None:
        super().__init__(plain_call(module), input_spec, backend)
        self._module, self._only_training = module, only_training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._only_training and not self._module.training:
            return plain_call(self._module)(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def to_static(
    target: T | None = None,
    *,
    input_spec: Sequence[InputSpec] | None = None,
    backend: str = "inductor",
    only_training: bool = False,
) -> Any:
    """Capture a module or a function as a graph when it is called, and compile it.

    It is also a decorator.

    The `auto_cast` region around the call decides the precision; `with auto_cast(...)` inside the
    function decides for the calls in it. A module stays the same object, with its weights,
    `state_dict` and hooks; copies of it are not captured.

    Args:
        target: A module, or a function of tensors.
        input_spec: Shapes and dtypes of the first inputs; shapes are checked, dtypes are cast.
        backend: As in `compile_step`.
        only_training: Do not capture a module in evaluation.

    Returns:
        The same module, or a function of the same name with `graphs` and `operators()`. For a
        module, `static_forward` returns the object that has them.

    >>> @to_static(backend="aot_eager")
    ... def double(x):
    ...     return x * 2
    >>> import torch
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    if target is None:
        return functools.partial(to_static, input_spec=input_spec, backend=backend, only_training=only_training)
    if isinstance(target, nn.Module):
        set_compiled_call(target, _ForwardOfModule(target, input_spec, backend, only_training))
        return target
    if not callable(target):
        raise TypeError(f"to_static takes a module or a function; got {type(target).__name__}")
    return _FunctionOrMethod(target, input_spec, backend)


def static_forward(module: nn.Module) -> StaticFunction:
    """Return the captured call of a module after `to_static`.

    Raises:
        ProgramError: `to_static` was not called on it.
    """
    forward = compiled_call(module)
    if not isinstance(forward, StaticFunction):
        raise ProgramError(f"this {type(module).__name__} is not captured: call mezzo.static.to_static(module) first")
    return forward
