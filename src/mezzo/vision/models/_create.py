"""Creates a network by its name, an alias or a PaddleSeg type."""

from __future__ import annotations

from typing import Any

from torch import nn

from mezzo.errors import unknown_choice
from mezzo.vision.models._registry import create_registered, names_and_aliases
from mezzo.vision.models._types import MODEL_TYPES, create_from_types


def create_model(name: str, **options: Any) -> nn.Module:
    """Return a new network.

    Args:
        name: A name of `list_models()`, an alias, or a type of PaddleSeg's (`PPLiteSeg` with `backbone="STDC2"`, ...).
        options: `num_classes`, and the other arguments of the function of that name (`mezzo.vision.models.hrnet`, ...).

    Raises:
        ValueError: There is no such network; the message suggests the nearest name.

    >>> import torch
    >>> create_model("pp_humanseg_lite", num_classes=3).eval()(torch.zeros(1, 3, 64, 64))[0].shape
    torch.Size([1, 3, 64, 64])
    """
    known = names_and_aliases()
    if name in MODEL_TYPES:
        return create_from_types({"type": name, **options})
    if name in known:
        return create_registered(name, **options)
    raise ValueError(unknown_choice("model", name, (*known, *MODEL_TYPES)))
