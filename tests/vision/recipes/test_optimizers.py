"""Optimizers of configurations: torch's own, with the right numbers, in the right groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_files import changed, faults, load
from torch import nn

from mezzo.vision.recipes import OptimizerRecipe, ParameterGroup


def network() -> nn.Module:
    model = nn.Module()
    model.backbone, model.head, model.norm = nn.Linear(2, 3), nn.Linear(3, 4), nn.BatchNorm1d(4)
    model.norm.bias.requires_grad_(False)
    return model


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., OptimizerRecipe]:
    """Return a function from the entries of an `optimizer` block to its recipe, with a rate of 0.1."""

    def read(**block: Any) -> OptimizerRecipe:
        return load(tmp_path, changed(optimizer=block, model=WITH_BACKBONE), learning_rate=0.1).optimizer

    return read


Read = Callable[..., OptimizerRecipe]
#: A network that has parameters called backbone and one head.
WITH_BACKBONE = {"type": "FCN", "backbone": "HRNet_W18_Small_V1"}


@pytest.mark.parametrize("name", ["sgd", "SGD", "Momentum"])
def test_sgd_by_any_spelling_has_momentum_and_decay(name: str, read: Read) -> None:
    optimizer = read(type=name, momentum=0.8, weight_decay=0.001, use_nesterov=True).create(network())
    assert type(optimizer) is torch.optim.SGD
    (group,) = optimizer.param_groups
    found = {key: group[key] for key in ("lr", "momentum", "weight_decay", "nesterov", "dampening", "lr_mult")}
    expected = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.001, "nesterov": True, "dampening": 0, "lr_mult": 1.0}
    assert found == expected


def test_sgd_steps_as_the_documents_formula_says(read: Read) -> None:
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    holder = nn.Module()
    holder.w = parameter
    optimizer = read(type="sgd", momentum=0.9, weight_decay=0.01).create(holder)
    w, v = 2.0, 0.0
    for gradient in (1.0, -0.5, 0.25):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        v = 0.9 * v + (gradient + 0.01 * w)
        w -= 0.1 * v
    assert parameter.item() == pytest.approx(w, rel=1e-12)


def test_adam_and_adamw_have_their_own_numbers(read: Read) -> None:
    adam = read(type="Adam", beta1=0.8, beta2=0.99, epsilon=1e-6, weight_decay=0.5).create(network())
    adamw = read(type="AdamW").create(network())
    assert type(adam) is torch.optim.Adam
    assert type(adamw) is torch.optim.AdamW
    assert (adam.defaults["betas"], adam.defaults["eps"]) == ((0.8, 0.99), 1e-6)
    assert adam.param_groups[0]["weight_decay"] == 0.5
    assert adamw.param_groups[0]["weight_decay"] == 0.01


def test_rmsprop_is_the_one_mobilenet_was_trained_with() -> None:
    optimizer = OptimizerRecipe(kind="rmsprop", lr=0.1, momentum=0.9, weight_decay=1e-5).create(network())
    assert type(optimizer) is torch.optim.RMSprop
    assert (optimizer.defaults["alpha"], optimizer.defaults["eps"]) == (0.9, 0.0316)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "rmsprop"])
def test_more_arguments_reach_the_class_of_the_optimizer(kind: Any) -> None:
    optimizer = OptimizerRecipe(kind=kind, lr=0.1).create(network(), foreach=False)
    assert optimizer.defaults["foreach"] is False


@pytest.mark.parametrize("block", [{"custom_cfg": [{"name": "backbone", "lr_mult": 0.25}]}, {"backbone_lr_mult": 0.25}])
def test_a_part_of_the_network_has_its_own_rate(block: dict, read: Read) -> None:
    model = network()
    backbone, rest = read(type="sgd", weight_decay=0.5, **block).create(model).param_groups
    assert (backbone["lr"], backbone["lr_mult"], rest["lr"], rest["lr_mult"]) == (0.025, 0.25, 0.1, 1.0)
    assert [id(p) for p in backbone["params"]] == [id(p) for p in model.backbone.parameters()]
    assert len(rest["params"]) == 3, "head and norm, without the bias that is not trained"
    assert backbone["weight_decay"] == rest["weight_decay"] == 0.5


def test_the_first_part_that_fits_has_the_parameter_and_decay_is_a_factor_too() -> None:
    parts = (ParameterGroup(name="head", weight_decay_mult=0.0), ParameterGroup(name="weight", lr_mult=2.0))
    recipe = OptimizerRecipe(kind="sgd", lr=1.0, weight_decay=0.1, parts=parts)
    groups = recipe.create(network()).param_groups
    found = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
    assert found == [(2, 1.0, 0.0), (2, 2.0, 0.1), (1, 1.0, 0.1)]


def test_a_part_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter for the part 'bakbone': none has that in its name"):
        OptimizerRecipe(kind="sgd", lr=1.0, parts=(ParameterGroup(name="bakbone"),)).create(network())


def test_the_norm_to_clip_by_is_kept(read: Read) -> None:
    assert read(type="sgd", grad_clip_cfg={"name": "ClipGradByGlobalNorm", "clip_norm": 2}).clip_norm == 2
    assert read(type="sgd").clip_norm is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "sdg"}, "unknown optimizer 'sdg'; did you mean 'sgd'"),
        ({"type": 3}, "unknown optimizer '3'; allowed: sgd"),
        ({}, "optimizer: type is missing; allowed: sgd, momentum, adam, adamw"),
        ({"type": "sgd", "momentun": 0.9}, "unknown key of sgd 'momentun'; did you mean 'momentum'"),
        ({"type": "sgd", "momentum": 1}, "sgd: momentum=1"),
        ({"type": "sgd", "momentum": "x"}, "sgd: momentum='x'"),
        ({"type": "sgd", "momentum": 0, "use_nesterov": True}, "use_nesterov=True: needs a momentum above 0"),
        ({"type": "sgd", "use_nesterov": 1}, "use_nesterov=1"),
        ({"type": "sgd", "weight_decay": -1}, "weight_decay=-1"),
        ({"type": "adam", "beta2": 1.0}, "beta2=1.0"),
        ({"type": "adam", "epsilon": 0}, "epsilon=0"),
        ({"type": "sgd", "backbone_lr_mult": -1}, "lr_mult=-1"),
        ({"type": "sgd", "custom_cfg": {"name": "x"}}, "custom_cfg"),
        ({"type": "sgd", "custom_cfg": [3]}, "custom_cfg: 3"),
        ({"type": "sgd", "custom_cfg": [{"lr_mult": 1}]}, "custom_cfg: name is missing"),
        ({"type": "sgd", "custom_cfg": [{"name": ""}]}, "name=''"),
        ({"type": "sgd", "custom_cfg": [{"name": "a", "lr": 1}]}, "unknown key of custom_cfg 'lr'"),
        (
            {"type": "sgd", "grad_clip_cfg": {"name": "ClipGradByNorm", "clip_norm": 1}},
            "ClipGradByNorm is not supported",
        ),
        (
            {"type": "sgd", "grad_clip_cfg": {"name": "ClipGlobal", "clip_norm": 1}},
            "unknown grad_clip_cfg 'ClipGlobal'",
        ),
        ({"type": "sgd", "grad_clip_cfg": {"name": "ClipGradByGlobalNorm"}}, "grad_clip_cfg: clip_norm is missing"),
        (
            {"type": "sgd", "grad_clip_cfg": {"name": "ClipGradByGlobalNorm", "clip_norm": 0}},
            "clip_norm=0",
        ),
    ],
)
def test_blocks_that_describe_no_optimizer_are_refused(block: dict, message: str, tmp_path: Path) -> None:
    assert any(message in line for line in faults(tmp_path, changed(optimizer=block, model=WITH_BACKBONE)))
