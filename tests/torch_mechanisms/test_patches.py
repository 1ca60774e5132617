"""A function is wrapped once, and keeps its name."""

import types
from collections.abc import Callable

from mezzo._torch.patches import wrap_attribute


def add_one(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: function(*args) + 1


def test_a_second_call_does_nothing_and_another_wrapper_goes_on_top() -> None:
    class Owner:
        def value(self) -> int:
            """What it was."""
            return 1

    for _ in range(2):
        wrap_attribute(Owner, "value", add_one)
    assert Owner().value() == 2
    assert Owner.value.__doc__ == "What it was."
    wrap_attribute(Owner, "value", lambda function: lambda self: function(self) * 10)
    assert Owner().value() == 20


def test_static_methods_and_functions_of_modules_are_wrapped_too() -> None:
    class Owner:
        @staticmethod
        def value(x: int) -> int:
            return x

    wrap_attribute(Owner, "value", add_one, static=True)
    assert (Owner.value(1), Owner().value(1)) == (2, 2)
    module = types.ModuleType("module")
    module.value = Owner.value
    wrap_attribute(module, "value", add_one)
    assert module.value(1) == 3
