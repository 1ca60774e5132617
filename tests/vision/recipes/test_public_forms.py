"""Forms that public PaddleSeg configurations have: each loads as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipe_files import changed, faults, load

from mezzo.vision.data import MiniDeepGlobeRoadExtraction, PPHumanSeg14K
from mezzo.vision.models import losses

ADDRESS = "https://example.com/weights.tar.gz"
TRANSFORMS = [{"type": "Normalize"}]


def data_of(kind: str) -> dict[str, Any]:
    block = {"type": kind, "dataset_root": "data/x", "transforms": TRANSFORMS}
    return {"train_dataset": {**block, "mode": "train"}, "val_dataset": {**block, "mode": "val"}}


def mixed(*kinds: str) -> dict[str, Any]:
    block = {"type": "MixedLoss", "losses": [{"type": kind} for kind in kinds], "coef": [1.0] * len(kinds)}
    return {"types": [block], "coef": [1]}


def test_addresses_of_weights_are_kept_as_text(tmp_path: Path) -> None:
    model = {"type": "FCN", "backbone": {"type": "HRNet_W18_Small_V1", "pretrained": ADDRESS}, "pretrained": ADDRESS}
    recipe = load(tmp_path, changed(model=model))
    assert (recipe.pretrained, recipe.backbone_pretrained) == (ADDRESS, ADDRESS)


@pytest.mark.parametrize("kind", [PPHumanSeg14K, MiniDeepGlobeRoadExtraction])
def test_two_class_sets_say_their_number_of_classes(tmp_path: Path, kind: type) -> None:
    recipe = load(tmp_path, changed(**data_of(kind.__name__)))
    assert recipe.num_classes == 2
    assert recipe.train_data is not None
    assert recipe.train_data.factory is kind


def test_a_mode_that_roads_do_not_have_is_named(tmp_path: Path) -> None:
    blocks = data_of("MiniDeepGlobeRoadExtraction")
    blocks["val_dataset"]["mode"] = "test"
    (line,) = faults(tmp_path, changed(**blocks))
    assert "unknown mode 'test'; allowed: train, val" in line


@pytest.mark.parametrize("kind", ["LovaszHingeLoss", "RMILoss"])
def test_mixtures_with_other_losses_are_made(tmp_path: Path, kind: str) -> None:
    loss = load(tmp_path, changed(loss=mixed("CrossEntropyLoss", kind))).create_loss()
    assert [type(part) for part in loss.losses[0].losses] == [losses.CrossEntropyLoss, getattr(losses, kind)]


def test_a_file_may_have_its_own_losses_and_the_coefficients_of_its_base(tmp_path: Path) -> None:
    load(tmp_path, changed())
    (tmp_path / "r.yml").rename(tmp_path / "base.yml")
    recipe = load(tmp_path, {"_base_": "base.yml", "loss": {"types": mixed("CrossEntropyLoss", "RMILoss")["types"]}})
    assert isinstance(recipe.create_loss().losses[0], losses.MixedLoss)


def test_what_is_left_out_of_a_loss_is_among_the_settings_without_effect(tmp_path: Path) -> None:
    recipe = load(tmp_path, changed(loss=mixed("CrossEntropyLoss", "SemanticConnectivityLoss"), save_interval=400))
    first, second = (line.partition("r.yml:")[2] for line in recipe.ignored)
    assert "save_interval: is an option of the command" in first
    assert second.endswith(
        "SemanticConnectivityLoss: is computed from predicted classes, so it has no gradient; the loss is without it"
    )
    assert "SemanticConnectivityLoss" in str(recipe.resolved["loss"])


def test_early_names_of_options_are_known(tmp_path: Path) -> None:
    model = {
        "type": "PPLiteSeg",
        "backbone": {"type": "STDC1", "pretrained": ADDRESS},
        "arm_type": "ARM_Add_SpAttenAdd3",
        "cm_bin_sizes": [1, 2, 4],
        "cm_out_ch": 128,
        "arm_out_chs": [32, 64, 128],
        "seg_head_mid_chs": [32, 64, 64],
        "resize_mode": "bilinear",
    }
    loss = {"types": [{"type": "OhemCrossEntropyLoss", "min_kept": 100}], "coef": [1, 1, 1]}
    assert load(tmp_path, changed(model=model, loss=loss)).model.options["seg_head_mid_chs"] == [32, 64, 64]
    (line,) = faults(tmp_path, changed(model=model | {"seg_head_mid_chs": [32]}, loss=loss))
    assert "seg_head_mid_chs=[32]" in line


def test_a_backbone_that_would_be_another_one_is_refused_at_its_line(tmp_path: Path) -> None:
    model = {"type": "DeepLabV3P", "backbone": {"type": "ResNet50_vd"}, "aspp_ratios": [1, 12, 24, 36]}
    (line,) = faults(tmp_path, changed(model=model))
    assert "ResNet50_vd: multi_grid is missing" in line
