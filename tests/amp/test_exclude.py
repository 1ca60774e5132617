"""Modules that run in float32 inside a region, without a change to their code."""

import pytest
import torch
from torch import nn

from mezzo.amp import auto_cast, decorate, exclude_layers, find_excluded, is_excluded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor, *, extra: list[torch.Tensor] | None = None) -> torch.Tensor:
        y = self.second(self.first(x))
        return y + extra[0] if extra else y


def seen_dtypes(model: nn.Module, **arguments: object) -> list[torch.dtype]:
    seen = []
    hooks = [m.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype)) for m in model.modules()]
    with auto_cast(**arguments):
        model(torch.ones(2, 4))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("by", ["instance", "type", "glob", "list"])
def test_an_excluded_layer_computes_in_float32_and_the_others_in_half(by: str, level: str) -> None:
    model = Block()
    layers = {"instance": model.second, "type": nn.Sequential, "glob": "sec*", "list": ["second.0", model.second]}[by]
    handle = exclude_layers(model, layers)
    half, full = torch.float16, torch.float32
    # order of the hooks: first, second.0, second.1, second, the model
    assert seen_dtypes(model, level=level) == [half, full, full, full, full]
    assert [m for m in model.modules() if is_excluded(m)] == [model.second]
    handle.remove()
    assert seen_dtypes(model, level=level) == [half] * 5


def test_keyword_and_nested_inputs_are_cast_too() -> None:
    model = Block()
    exclude_layers(model, model)
    with auto_cast():
        out = model(torch.ones(2, 4).half(), extra=[torch.ones(2, 4).half()])
    assert out.dtype is torch.float32


def test_outside_a_region_nothing_is_cast() -> None:
    model = Block().double()
    exclude_layers(model, "first")
    assert model(torch.ones(2, 4).double()).dtype is torch.float64


def test_excluding_twice_is_the_same_as_once_and_an_own_forward_survives() -> None:
    model = Block()
    plain_forward = model.first.forward
    model.first.forward = lambda x: plain_forward(x) + 1  # somebody patched the instance
    expected = model.first(torch.ones(2, 4))
    handle = exclude_layers(model, "first")
    assert exclude_layers(model, "first").modules == []
    with auto_cast():
        torch.testing.assert_close(model.first(torch.ones(2, 4)), expected, rtol=0, atol=0)
    handle.remove()
    torch.testing.assert_close(model.first(torch.ones(2, 4)), expected, rtol=0, atol=0)


def test_only_the_outermost_of_nested_matches_is_wrapped() -> None:
    model = Block()
    assert find_excluded(model, ["second.*", "second"]) == [model.second]


def test_a_type_that_the_model_does_not_have_warns() -> None:
    with pytest.warns(UserWarning, match="excluded_layers: the model has no Conv2d"):
        assert find_excluded(Block(), nn.Conv2d) == []


def test_a_glob_without_a_match_names_the_nearest_module() -> None:
    with pytest.raises(ValueError, match="no module is named 'secnd'; did you mean 'second'"):
        find_excluded(Block(), "secnd")


def test_excluding_a_layer_of_a_decorated_model_gives_it_its_float32_weights_back() -> None:
    model = Block()
    exact = model.first.weight.detach().clone()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    exclude_layers(model, "first")
    assert torch.equal(model.first.weight, exact)
    with auto_cast(level="O2"):
        model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    assert model.first.weight.dtype is torch.float32
    assert not torch.equal(model.first.weight, exact)


def test_a_half_layer_without_float32_values_is_refused() -> None:
    with pytest.raises(ValueError, match="'weight' is float16 and has no float32 value"):
        exclude_layers(Block().half(), "first")


def test_a_glob_far_from_every_name_lists_some() -> None:
    with pytest.raises(ValueError, match="no module is named 'zzz'; the model has first, second"):
        find_excluded(Block(), "zzz")


def test_layers_that_were_excluded_before_stay_float32_when_the_model_is_decorated():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    exclude_layers(net, "1")
    decorate(net, optimizer, level="O2")
    assert net[0].weight.dtype is torch.float16
    assert net[1].weight.dtype is torch.float32
    with auto_cast(level="O2"):
        assert net(torch.ones(2, 4)).dtype is torch.float32
