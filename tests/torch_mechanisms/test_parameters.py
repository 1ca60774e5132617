"""Deep copies of parameters go through the wrapped method."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mezzo._torch import patches
from mezzo._torch.parameters import MASTER_ATTRIBUTE, has_master, wrap_parameter_copies


def test_a_copied_model_copies_its_parameters_through_it() -> None:
    def around(copy_parameter: Callable[..., Any]) -> Callable[..., Any]:
        def run(param: nn.Parameter, memo: dict[int, Any]) -> Any:
            copied = copy_parameter(param, memo)
            copied.mark = True
            return copied

        return run

    before = nn.Parameter.__deepcopy__
    wrap_parameter_copies(around)
    try:
        model = copy.deepcopy(nn.Linear(2, 2))
    finally:
        nn.Parameter.__deepcopy__ = before
        patches._wrapped.discard((id(nn.Parameter), "__deepcopy__", around))
    assert all(param.mark for param in model.parameters()), "deepcopy no longer asks nn.Parameter.__deepcopy__"


def test_torch_still_drops_what_is_attached() -> None:
    """If this fails, the wrapper is needed no longer."""
    param = nn.Parameter(torch.ones(1))
    param.unknown_to_torch = True
    assert not hasattr(copy.deepcopy(param), "unknown_to_torch")


def test_a_saved_parameter_keeps_what_is_attached() -> None:
    param, file = nn.Parameter(torch.ones(1)), io.BytesIO()
    assert not has_master(param)
    setattr(param, MASTER_ATTRIBUTE, torch.ones(1))
    torch.save(param, file)
    file.seek(0)
    assert has_master(torch.load(file, weights_only=True))
