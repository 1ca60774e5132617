"""Losses of configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_files import changed, faults, load

from mezzo.vision.models import losses
from mezzo.vision.recipes import ClassLoss, LossRecipe

HEADS = {
    1: {"type": "PPHumanSegLite"},
    2: {"type": "OCRNet", "backbone": {"type": "HRNet_W18_Small_V1"}},
    3: {"type": "PPLiteSeg", "backbone": {"type": "STDC1"}},
}


def recipe_with(block: Any, num_classes: int, ignore_index: int = 255) -> dict[str, Any]:
    """Return a recipe with a `loss` block, and a network with one head per coefficient."""
    coefs = block.get("coef") if isinstance(block, dict) else None
    data = changed(loss=block, model=HEADS.get(len(coefs or ()), HEADS[1]))
    for key in ("train_dataset", "val_dataset"):
        data[key] |= {"num_classes": num_classes, "ignore_index": ignore_index}
    return data


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., LossRecipe]:
    """Return a function from a `loss` block to its recipe."""

    def read(block: Any, num_classes: int = 4, ignore_index: int = 255) -> LossRecipe:
        loss = load(tmp_path, recipe_with(block, num_classes, ignore_index)).loss
        assert loss is not None
        return loss

    return read


Read = Callable[..., LossRecipe]


def logits_and_labels(heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    labels = torch.randint(4, (2, 5, 6))
    labels[0, :2] = 255
    return [torch.randn(2, 4, 5, 6) for _ in range(heads)], labels


def test_one_type_serves_as_many_heads_as_there_are_coefficients(read: Read) -> None:
    outputs, labels = logits_and_labels(3)
    loss = read(
        {"types": [{"type": "OhemCrossEntropyLoss", "min_kept": 7, "thresh": 0.6}], "coef": [1, 0.5, 2]}
    ).create()
    single = losses.OhemCrossEntropyLoss(0.6, 7)
    expected = sum(c * single(out, labels) for c, out in zip((1, 0.5, 2), outputs, strict=True))
    assert loss(outputs, labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert all(isinstance(part, losses.OhemCrossEntropyLoss) for part in loss.losses)


def test_mixed_loss_is_the_weighted_sum_of_its_terms(read: Read) -> None:
    outputs, labels = logits_and_labels(1)
    mixed = {
        "type": "MixedLoss",
        "losses": [{"type": "CrossEntropyLoss"}, {"type": "LovaszSoftmaxLoss"}],
        "coef": [0.8, 0.2],
    }
    loss = read({"types": [mixed], "coef": [2]}).create()
    expected = 2 * (
        0.8 * torch.nn.functional.cross_entropy(outputs[0], labels, ignore_index=255)
        + 0.2 * losses.LovaszSoftmaxLoss()(outputs[0], labels)
    )
    assert loss(outputs, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_weights_of_classes_reach_the_loss(read: Read) -> None:
    outputs, labels = logits_and_labels(1)
    weight = [1.0, 0.0, 2.0, 0.5]
    loss = read({"types": [{"type": "CrossEntropyLoss", "weight": weight}], "coef": [1]}).create()
    expected = torch.nn.functional.cross_entropy(outputs[0], labels, torch.tensor(weight), ignore_index=255)
    assert loss(outputs, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_mean_over_the_pixels_that_count_may_be_asked_for(read: Read) -> None:
    outputs, labels = logits_and_labels(1)
    loss = read({"types": [{"type": "CrossEntropyLoss", "avg_non_ignore": True}], "coef": [1]}).create()
    expected = torch.nn.functional.cross_entropy(outputs[0], labels, ignore_index=255)
    assert loss(outputs, labels).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_label_that_the_files_leave_out_is_255_when_the_loss_sees_it(read: Read) -> None:
    loss = read({"types": [{"type": "CrossEntropyLoss", "ignore_index": 0}], "coef": [1]}, ignore_index=0).create()
    assert loss.losses[0].ignore_index == 255


def test_classification_takes_a_tensor_or_a_list_and_computes_in_float32() -> None:
    logits, labels = torch.randn(8, 5), torch.randint(5, (8,))
    expected = torch.nn.functional.cross_entropy(logits.half().float(), labels)
    loss = ClassLoss()
    assert loss(logits.half(), labels).dtype is torch.float32
    assert loss(logits.half(), labels).item() == pytest.approx(expected.item())
    assert loss([logits.half()], labels.to(torch.uint8)).item() == pytest.approx(expected.item())


CE = {"type": "CrossEntropyLoss"}
CONNECTIVITY = {"type": "SemanticConnectivityLoss", "max_pred_num_conn": 5}


def mixed(*items: dict[str, Any], coef: list[float]) -> dict[str, Any]:
    return {"types": [{"type": "MixedLoss", "losses": list(items), "coef": coef}], "coef": [1]}


def test_arguments_of_region_mutual_information_reach_the_loss(read: Read) -> None:
    block = {"type": "RMILoss", "num_classes": 4, "rmi_radius": 2, "rmi_pool_size": 1, "rmi_pool_stride": 1}
    loss = read({"types": [block], "coef": [1]}).create().losses[0]
    assert isinstance(loss, losses.RMILoss)
    assert (loss.radius, loss.pool, loss.ignore_index) == (2, 1, 255)
    plain = read({"types": [{"type": "RMILoss"}], "coef": [1]}).create().losses[0]
    assert (plain.radius, plain.pool) == (3, 3)


def test_two_classes_may_have_a_hinge_loss(read: Read) -> None:
    loss = read(mixed(CE, {"type": "LovaszHingeLoss"}, coef=[1, 0.01]), num_classes=2).create().losses[0]
    assert [type(part) for part in loss.losses] == [losses.CrossEntropyLoss, losses.LovaszHingeLoss]
    assert loss.coefs == (1, 0.01)


def test_a_loss_without_gradient_is_left_out_of_a_mixture_and_that_is_said_once(read: Read) -> None:
    block = mixed(CE, CONNECTIVITY, {"type": "LovaszSoftmaxLoss"}, coef=[0.8, 0.1, 0.2]) | {"coef": [1, 0.4]}
    recipe = read(block)
    (line,) = recipe.ignored
    assert ": SemanticConnectivityLoss: " in line
    for head in recipe.create().losses:
        assert [type(part) for part in head.losses] == [losses.CrossEntropyLoss, losses.LovaszSoftmaxLoss]
        assert head.coefs == (0.8, 0.2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (3, "loss: 3"),
        ({"types": [CE]}, "loss: coef is missing"),
        ({"types": CE, "coef": [1]}, "loss: types must be a list, one entry a loss"),
        ({"types": [CE], "coef": [1], "typs": 1}, "unknown key of loss 'typs'; did you mean 'types'"),
        ({"types": [CE, CE], "coef": [1, 1, 1]}, "loss: 2 losses and 3 coefficients; must be as many, at least one"),
        ({"types": [], "coef": []}, "loss: 0 losses and 0 coefficients; must be as many, at least one"),
        ({"types": [CE], "coef": ["x"]}, "loss: coef[0]='x'"),
        (
            {"types": [{"type": "CrossEntropy"}], "coef": [1]},
            "unknown loss 'CrossEntropy'; did you mean 'CrossEntropyLoss'",
        ),
        ({"types": [3], "coef": [1]}, "loss: 3"),
        ({"types": [{**CE, "min_kept": 3}], "coef": [1]}, "unknown key of CrossEntropyLoss 'min_kept'"),
        ({"types": [{**CE, "ignore_index": 0}], "coef": [1]}, "ignore_index=0: the data set leaves out 255"),
        ({"types": [{**CE, "weight": [1, 2]}], "coef": [1]}, "weight: 2 numbers for 4 classes; must be one a class"),
        ({"types": [{**CE, "weight": "dynamic"}], "coef": [1]}, "weight='dynamic'"),
        (
            {"types": [{**CE, "top_k_percent_pixels": 0.5}], "coef": [1]},
            "top_k_percent_pixels=0.5: only 1.0",
        ),
        ({"types": [{**CE, "avg_non_ignore": False}], "coef": [1]}, "avg_non_ignore=False: only True"),
        ({"types": [{**CE, "data_format": "NHWC"}], "coef": [1]}, "data_format='NHWC': only 'NCHW'"),
        (
            {"types": [{"type": "OhemCrossEntropyLoss", "thresh": 2}], "coef": [1]},
            "thresh=2",
        ),
        (
            {"types": [{"type": "OhemCrossEntropyLoss", "min_kept": -1}], "coef": [1]},
            "min_kept=-1",
        ),
        (
            {"types": [{"type": "LovaszSoftmaxLoss", "classes": "all"}], "coef": [1]},
            "classes='all': only 'present'",
        ),
        ({"types": [{"type": "MixedLoss"}], "coef": [1]}, "MixedLoss: losses is missing"),
        (
            {"types": [{"type": "MixedLoss", "losses": [CE, CE], "coef": [1]}], "coef": [1]},
            "MixedLoss: 2 losses and 1 coefficients; must be as many",
        ),
        (
            {"types": [{"type": "MixedLoss", "losses": [{"type": "Lovasz"}], "coef": [1]}], "coef": [1]},
            "unknown loss 'Lovasz'; allowed: CrossEntropyLoss",
        ),
        (
            {"types": [{"type": "LovaszHingeLoss"}], "coef": [1]},
            "LovaszHingeLoss: 4 classes; it is for two, LovaszSoftmaxLoss for more",
        ),
        (
            {"types": [{"type": "RMILoss", "num_classes": 19}], "coef": [1]},
            "RMILoss: num_classes=19: the data have 4; remove it here",
        ),
        (
            {"types": [{"type": "RMILoss", "rmi_radius": 11}], "coef": [1]},
            "rmi_radius=11",
        ),
        ({"types": [{"type": "RMILoss", "rmi_pool_way": 1}], "coef": [1]}, "rmi_pool_way=1: only 0"),
        ({"types": [{"type": "RMILoss", "rmi_pool_size": 0}], "coef": [1]}, "rmi_pool_size=0"),
        ({"types": [{"type": "RMILoss", "rmi_pool_size": 4}], "coef": [1]}, "rmi_pool_stride=3: only 4"),
        (
            {"types": [{"type": "RMILoss", "loss_weight_lambda": "x"}], "coef": [1]},
            "loss_weight_lambda='x'",
        ),
        (
            {"types": [CONNECTIVITY], "coef": [1]},
            "loss: SemanticConnectivityLoss has no gradient",
        ),
        (mixed(CONNECTIVITY, coef=[1]), "loss: SemanticConnectivityLoss has no gradient"),
        (mixed(CE, {**CONNECTIVITY, "use_argmax": False}, coef=[1, 1]), "use_argmax=False: only True"),
        (
            mixed(CE, {**CONNECTIVITY, "max_pred_num_conn": 0}, coef=[1, 1]),
            "max_pred_num_conn=0",
        ),
    ],
)
def test_blocks_that_describe_no_loss_are_refused(block: Any, message: str, tmp_path: Path) -> None:
    assert any(message in line for line in faults(tmp_path, recipe_with(block, 4)))
