"""Names of parameters for messages: from the optimizer, or from a remembered model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_names(model: nn.Module) -> None:
    """Remember the names of a model's parameters, by weak references."""
    for name, param in model.named_parameters():
        _names[param] = name


def name_of(param: Tensor) -> str | None:
    """Return the remembered name of a parameter, or None."""
    return str(_names[param]) if param in _names else None


def describe_parameter(optimizer: Optimizer, index: int) -> str:
    """Return the name of parameter `index`, counted over all groups.

    If unknown, its position and shape.
    """
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        if index >= len(params):
            index -= len(params)
            continue
        param = params[index]
        named = group["param_names"][index] if "param_names" in group else name_of(param)
        return repr(named) if named else f"parameter #{index} of group {number}, shape {tuple(param.shape)}"
    return "an unknown parameter"
