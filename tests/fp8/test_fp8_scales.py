"""What delayed scaling has learnt, kept over a break."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from o3_nets import RECIPE, batch, decorated, layers, region
from torch import nn
from torch.nn.functional import mse_loss

from mezzo.amp import fp8_scales, load_fp8_scales

DELAYED = replace(RECIPE, scaling="delayed", history=4)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> float:
    x, target = batch()
    with region(recipe=DELAYED):
        loss = mse_loss(net(x * factor), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def broken_off() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network some steps on; inputs were 64 times as large once, so that scales still leave room for them."""
    net, optimizer = decorated(layers())
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for factor in (1.0, 64.0, 1.0):
        step(net, optimizer, factor)
    return net, optimizer


def resumed(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return another network with the weights and the optimizer's state of one."""
    other, its = decorated(layers(seed=1))
    other.load_state_dict(net.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, its


def test_training_goes_on_with_the_scales_bit_for_bit() -> None:
    net, optimizer = broken_off()
    scales = fp8_scales(net)
    others = [resumed(net, optimizer) for _ in range(2)]
    load_fp8_scales(others[0][0], scales)
    unbroken = [step(net, optimizer) for _ in range(5)]
    assert [step(*others[0]) for _ in range(5)] == unbroken
    assert [step(*others[1]) for _ in range(5)] != unbroken  # without them the first scales have less room


def test_scales_are_by_weight_and_role_newest_first() -> None:
    net, _ = broken_off()
    scales = fp8_scales(net)
    assert list(scales) == ["2.weight", "4.weight", "6.weight"]  # the first and the last layer are in half
    of_input = scales["2.weight"]["input"]
    assert of_input.shape == (4,)
    assert of_input[1] > 8 * of_input[0]  # the call before the last had large inputs
    assert of_input[3] == 0  # there were three calls
    assert all(set(learnt) == {"input", "gradient"} for learnt in scales.values())


def test_who_scales_by_the_tensor_itself_has_none() -> None:
    net, optimizer = decorated()
    with region():
        mse_loss(net(batch()[0]), batch()[1]).backward()
    optimizer.step()
    assert fp8_scales(net) == {}
    load_fp8_scales(net, {})
    assert fp8_scales(net) == {}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"9.weight": {}}, "'9.weight'"),
        ({"2.weight": {"output": torch.ones(4)}}, "'2.weight'"),
        ({"2.weight": {"input": torch.ones(2, 2)}}, "'2.weight'"),
        ({"2.weight": {"input": torch.ones(4, dtype=torch.int64)}}, "'2.weight'"),
        ({"2.weight": {"input": torch.ones(0)}}, "'2.weight'"),
        ({"2.weight": {"input": torch.tensor([1.0, float("nan")])}}, "'2.weight'"),
        ({"2.weight": {"input": torch.tensor([-1.0])}}, "'2.weight'"),
        ({"2.bias": {"input": torch.ones(4)}}, "'2.bias'"),
        ({"2.weight": {"input": [1.0]}}, "'2.weight'"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused_and_change_nothing(scales: dict[str, Any], message: str) -> None:
    net, _ = broken_off()
    before = fp8_scales(net)
    good = {"4.weight": {"input": torch.full((4,), 7.0)}}
    with pytest.raises(ValueError, match=re.escape(message)):
        load_fp8_scales(net, {**good, **scales})
    after = fp8_scales(net)
    assert all(torch.equal(after[name][role], before[name][role]) for name in before for role in before[name])


def test_a_model_that_is_not_decorated_keeps_no_scales() -> None:
    net, _ = broken_off()
    message = "'2.weight'"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_fp8_scales(layers(), fp8_scales(net))
