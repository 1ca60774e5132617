"""How a model is called with a batch: one argument, several, or named ones."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(model: nn.Module, inputs: Any) -> Arguments:
    """Return the positional and the named arguments that a model is called with.

    A tuple holds positional arguments, a mapping named ones. Where `forward` does not take them so, and for anything
    else, `inputs` is the one argument.

    >>> arguments_of(nn.Bilinear(2, 2, 1), ("a", "b")), arguments_of(nn.Linear(2, 2), ("a", "b"))
    ((('a', 'b'), {}), ((('a', 'b'),), {}))
    >>> arguments_of(nn.Linear(2, 2), {"input": "a"}), arguments_of(nn.Linear(2, 2), {"image": "a"})
    (((), {'input': 'a'}), (({'image': 'a'},), {}))
    """
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields") and _takes(model, inputs, {}):
        return inputs, {}
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs) and _takes(model, (), inputs):
        return (), dict(inputs)
    return (inputs,), {}


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a forward without a signature, such as a scripted one, is believed to
        return True
    return True


def batch_size_of(inputs: Any) -> int | None:
    """Return the first size of the first tensor that has one; None if there is none.

    >>> import torch
    >>> batch_size_of({"scale": torch.ones(()), "image": torch.ones(4, 3)})
    4
    """
    sizes = (leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, None)
