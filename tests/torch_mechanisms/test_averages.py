"""torch's AveragedModel creates and updates through the wrapped methods, also in subclasses."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.optim.swa_utils import AveragedModel

from mezzo._torch import patches
from mezzo._torch.averages import wrap_averages


class Ema(AveragedModel):
    pass


def test_both_methods_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                return method(*args, **kwargs)

            return run

        return around

    arounds = {"__init__": noting("create"), "update_parameters": noting("update")}
    before = {name: getattr(AveragedModel, name) for name in arounds}
    wrap_averages(*arounds.values())
    try:
        model = nn.Linear(1, 1)
        Ema(model).update_parameters(model)
    finally:
        for name, method in before.items():
            setattr(AveragedModel, name, method)
            patches._wrapped.discard((id(AveragedModel), name, arounds[name]))
    assert seen == ["create", "update"]


def test_an_update_reads_parameters_and_buffers_alone() -> None:
    """What stands in for a model has these two methods and no others."""

    class Source:
        def __init__(self, model: nn.Module) -> None:
            self.parameters, self.buffers = model.parameters, model.buffers

    model = nn.Linear(1, 1)
    average = AveragedModel(model)
    average.update_parameters(Source(model))
    assert average.n_averaged == 1
