"""A tensor without memory has the shape and dtype that it was given, and its class computes its operators."""

from typing import Any

import torch
from torch import Tensor

from mezzo._torch.wrapper_tensors import make_wrapper, no_function_rules


class Doubled(Tensor):
    """Holds a tensor; operators get twice its numbers."""

    __torch_function__ = no_function_rules

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> "Doubled":
        made = make_wrapper(cls, inner.shape, dtype=torch.bfloat16, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(2 * arg.inner if isinstance(arg, Doubled) else arg for arg in args), **(kwargs or {}))


def test_a_wrapper_has_a_dtype_of_its_own_and_no_memory() -> None:
    made = Doubled(torch.ones(2, 3))
    assert (tuple(made.shape), made.dtype) == ((2, 3), torch.bfloat16)
    assert made.is_contiguous()


def test_its_class_computes_operators() -> None:
    assert (Doubled(torch.ones(2)) + 1).tolist() == [3, 3]
    assert type(torch.add(Doubled(torch.ones(2)), 1)) is Tensor
