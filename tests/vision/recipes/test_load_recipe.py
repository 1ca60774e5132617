"""A whole file: what it becomes, and every fault of it in one error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import recipe_files
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipe_files import changed, faults, load

from mezzo.vision.data import Compose
from mezzo.vision.recipes import RecipeError, load_recipe


def test_a_file_becomes_a_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, recipe_files.TEXT)
    assert (recipe.task, recipe.num_classes, recipe.batch_size, recipe.iters, recipe.epochs) == (
        "segmentation", 2, 4, 100, None,
    )  # fmt: skip
    assert recipe.schedule.lr(50) == pytest.approx(0.01 * 0.5**0.9)
    assert recipe.optimizer.create(recipe.create_model()).param_groups[0]["lr"] == 0.01
    assert recipe.pretrained is None
    assert recipe.ignored == ()


def test_transforms_are_made_and_evaluation_leaves_labels_alone(tmp_path: Path) -> None:
    recipe = load(tmp_path, recipe_files.TEXT)
    assert recipe.train_data is not None
    assert recipe.val_data is not None
    assert isinstance(recipe.train_data.transforms, Compose)
    assert [type(item).__name__ for item in recipe.train_data.transforms.on_host] == ["Resize", "RandomHorizontalFlip"]
    assert recipe.train_data.transforms.normalize is not None
    assert (recipe.train_data.transforms.image_only, recipe.val_data.transforms.image_only) == (False, True)


def test_data_are_opened_only_when_asked(tmp_path: Path) -> None:
    data = changed()
    data["train_dataset"] |= {"dataset_root": str(tmp_path / "gone"), "train_path": str(tmp_path / "gone.txt")}
    recipe = load(tmp_path, data)
    assert recipe.train_data is not None
    with pytest.raises(Exception, match="gone"):
        recipe.train_data.open()


def test_what_is_not_written_is_what_paddleseg_takes(tmp_path: Path) -> None:
    data = changed(optimizer=None, batch_size=None, lr_scheduler={"type": "PolynomialDecay", "learning_rate": 0.5})
    del data["train_dataset"]["mode"], data["val_dataset"]["mode"]
    resolved = load(tmp_path, data).resolved
    assert resolved["optimizer"] == {"type": "sgd", "momentum": 0.9, "weight_decay": 4e-5}
    assert resolved["lr_scheduler"] == {
        "type": "PolynomialDecay", "learning_rate": 0.5, "decay_steps": 100, "end_lr": 0.0, "power": 0.9,
    }  # fmt: skip
    assert resolved["batch_size"] == 1
    assert (resolved["train_dataset"]["mode"], resolved["val_dataset"]["mode"]) == ("train", "val")
    assert resolved["model"]["num_classes"] == 2


def test_decay_ends_with_the_run_although_it_begins_behind_the_warm_up(tmp_path: Path) -> None:
    schedule = {**recipe_files.PLAIN["lr_scheduler"], "warmup_iters": 20, "warmup_start_lr": 0.001}
    recipe = load(tmp_path, changed(lr_scheduler=schedule))
    rates = [recipe.schedule.lr(step) for step in (0, 10, 20, 60, 100)]
    assert rates == pytest.approx([0.001, 0.0055, 0.01, 0.01 * 0.5**0.9, 0])


def test_cosine_lasts_for_the_run(tmp_path: Path) -> None:
    recipe = load(tmp_path, changed(lr_scheduler={"type": "CosineAnnealingDecay", "learning_rate": 1.0}))
    assert [recipe.schedule.lr(step) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"value": 0.01, "decay": {"type": "poly", "power": 0.8, "end_lr": 0.001}},
            {"type": "PolynomialDecay", "learning_rate": 0.01, "power": 0.8, "end_lr": 0.001, "decay_steps": 100},
        ),
        (
            {"value": 0.01},
            {"type": "PolynomialDecay", "learning_rate": 0.01, "power": 0.9, "end_lr": 0.0, "decay_steps": 100},
        ),
        (
            {"value": [1, 2], "decay": {"type": "piecewise", "boundaries": [5]}},
            {"type": "PiecewiseDecay", "values": [1, 2], "boundaries": [5]},
        ),
        (
            {"value": 0.1, "decay": {"type": "stepdecay", "step_size": 9}},
            {"type": "StepDecay", "learning_rate": 0.1, "step_size": 9},
        ),
    ],
)
def test_the_old_form_of_rates_means_the_new_one(tmp_path: Path, old: dict, new: dict) -> None:
    resolved = load(tmp_path, changed(lr_scheduler=None, learning_rate=old)).resolved
    assert resolved["lr_scheduler"] == new
    assert "learning_rate" not in resolved


def test_resolved_data_make_the_same_recipe_again(tmp_path: Path) -> None:
    text = recipe_files.TEXT + "export: {transforms: [{type: Normalize}]}\n"
    first = load(tmp_path, text, opts=["optimizer.custom_cfg=[{name: conv, lr_mult: 0.1}]"], iters=30)
    again = load(tmp_path, yaml.safe_dump(first.resolved, sort_keys=False))
    assert again.resolved == first.resolved
    assert (again.optimizer, again.schedule, again.model) == (first.optimizer, first.schedule, first.model)


def test_settings_without_effect_are_kept_and_named(tmp_path: Path) -> None:
    text = recipe_files.TEXT + "test_config:\n  aug_eval: True\nprecision: fp16\nlearning_rate: {value: 1}\n"
    recipe = load(tmp_path, text)
    assert recipe.resolved["test_config"] == {"aug_eval": True}
    places = [line.replace(f"{tmp_path}/", "").rpartition(": ")[0] for line in recipe.ignored]
    assert places == ["r.yml:37: test_config", "r.yml:39: precision", "r.yml:40: learning_rate"]


@pytest.mark.parametrize(
    "key", ["save_interval", "num_workers", "amp_level", "resume_model", "dist_timeout", "use_vdl"]
)
def test_options_of_the_command_are_named_in_a_file(tmp_path: Path, key: str) -> None:
    (line,) = load(tmp_path, recipe_files.TEXT + f"{key}: 3\n").ignored
    assert f"37: {key}: is an option of the command" in line


@pytest.mark.parametrize("key", ["global", "runtime", "train", "eval", "test", "infer"])
def test_blocks_about_the_running_of_commands_have_no_effect_and_are_named(tmp_path: Path, key: str) -> None:
    recipe = load(tmp_path, recipe_files.TEXT + f"{key}:\n  epochs: 3\n")
    assert recipe.resolved[key] == {"epochs": 3}
    (line,) = recipe.ignored
    assert line.startswith(f"{tmp_path}/r.yml:37: {key}: ")


@pytest.mark.parametrize("weights", ["weights/model.pdparams", "https://example.org/model.pdparams"])
def test_weights_to_begin_with_are_kept_as_text(tmp_path: Path, weights: str) -> None:
    model = {"type": "FCN", "backbone": {"type": "HRNet_W18_Small_V1", "pretrained": weights}, "pretrained": None}
    recipe = load(tmp_path, changed(model=model))
    assert (recipe.pretrained, recipe.backbone_pretrained) == (None, weights)
    assert recipe.resolved["model"]["backbone"]["pretrained"] == weights
    recipe = load(tmp_path, changed(model={"type": "PPHumanSegLite", "pretrained": weights}))
    assert (recipe.pretrained, recipe.backbone_pretrained) == (weights, None)


def test_classes_come_from_the_data_set_of_a_known_kind(tmp_path: Path) -> None:
    data = {"type": "Cityscapes", "dataset_root": "x", "transforms": [{"type": "Normalize"}]}
    recipe = load(tmp_path, changed(train_dataset=data, val_dataset=None))
    assert recipe.num_classes == recipe.resolved["model"]["num_classes"] == 19
    assert recipe.val_data is None


def test_classes_of_the_optic_disc_are_known(tmp_path: Path) -> None:
    data = {"type": "OpticDiscSeg", "dataset_root": "x", "transforms": [{"type": "Normalize"}]}
    assert load(tmp_path, changed(train_dataset=data, val_dataset=None)).num_classes == 2


def test_augmented_pascal_voc_is_a_mode_of_its_own(tmp_path: Path) -> None:
    data = {"type": "PascalVOC", "dataset_root": "x", "mode": "trainaug", "transforms": [{"type": "Normalize"}]}
    recipe = load(tmp_path, changed(train_dataset=data, val_dataset=None))
    assert recipe.train_data is not None
    assert recipe.train_data.options == {"dataset_root": "x", "mode": "trainaug"}


def padding_of(tmp_path: Path, value: object, ignored: int | None, key: str = "train_dataset") -> Any:
    """Return the padding of labels that a transform gets when a file says a value, or nothing."""
    data = changed()
    given = {} if value is None else {"label_padding_value": value}
    data[key] |= {"transforms": [{"type": "Padding", "target_size": [9, 9], **given}]}
    data[key] |= {} if ignored is None else {"ignore_index": ignored}
    recipe = load(tmp_path, data)
    read = recipe.train_data if key == "train_dataset" else recipe.val_data
    assert read is not None
    assert recipe.resolved[key]["transforms"][0].get("label_padding_value") == value, "what was written is kept"
    padding: Any = read.transforms.on_host[0]
    return padding.label_padding_value


@pytest.mark.parametrize("key", ["train_dataset", "val_dataset"])
@pytest.mark.parametrize(
    ("value", "ignored", "expected"),
    [
        (None, None, 255),
        (None, 0, 255),
        (255, 0, 255),
        (0, 0, 255),
        (1, 0, 1),
        (200, 200, 255),
        (0, 200, 0),
        (1, None, 1),
    ],
)
def test_labels_are_padded_with_the_value_that_does_not_count(
    tmp_path: Path, key: str, value: object, ignored: int | None, expected: int
) -> None:
    assert padding_of(tmp_path, value, ignored, key) == expected


@pytest.mark.parametrize(
    "name", ["Padding", "PaddingByAspectRatio", "RandomPaddingCrop", "RandomRotation", "RandomAffine"]
)
def test_padding_that_is_no_class_is_a_fault_with_its_line(tmp_path: Path, name: str) -> None:
    size = "      target_size: [9, 9]\n" if name == "Padding" else ""
    text = recipe_files.TEXT.replace("  mode: train\n", "  mode: train\n  ignore_index: 0\n").replace(
        "    - type: RandomHorizontalFlip\n", f"    - type: {name}\n      label_padding_value: 7\n{size}"
    )
    expected = "r.yml:14: label_padding_value=7"
    assert faults(tmp_path, text) == [expected]


def test_transforms_that_evaluation_cannot_undo_are_faults_with_their_lines(tmp_path: Path) -> None:
    head, _, tail = recipe_files.TEXT.rpartition("    - type: Normalize\n")
    text = f"{head}    - type: RandomHorizontalFlip\n    - type: Resize\n    - prob: 1\n      type: RandomVerticalFlip\n{tail}"
    reason = "changes an image in a way that evaluation cannot undo; leave it out"
    assert faults(tmp_path, text) == [
        f"r.yml:21: val_dataset: RandomHorizontalFlip {reason}",
        f"r.yml:24: val_dataset: RandomVerticalFlip {reason}",
    ]


def test_every_fault_of_a_file_is_in_one_error_with_its_line(tmp_path: Path) -> None:
    text = (
        recipe_files.TEXT.replace("batch_size: 4", "batch_siz: 4")
        .replace("type: RandomHorizontalFlip", "type: RandomHorizontalFlop")
        .replace("target_size: [64, 32]", "target_siz: [64, 32]")
        .replace("momentum: 0.9", "momentum: 9")
        .replace("learning_rate: 0.01", "learning_rate: fast")
        .replace("type: CrossEntropyLoss", "type: CrossEntropyLos")
        .replace("type: PPHumanSegLite", "type: PPHumanSeg")
    )
    assert [line.partition(" allowed")[0] for line in faults(tmp_path, text)] == [
        "r.yml:1: unknown key of a configuration 'batch_siz'; did you mean 'batch_size'?",
        "r.yml:11: unknown key of Resize 'target_siz'; did you mean 'target_size'?",
        "r.yml:12: unknown transform 'RandomHorizontalFlop'; did you mean 'RandomHorizontalFlip'?",
        "r.yml:24: sgd: momentum=9",
        "r.yml:28: PolynomialDecay: learning_rate='fast'",
        "r.yml:33: unknown loss 'CrossEntropyLos'; did you mean 'CrossEntropyLoss'?",
        "r.yml:36: unknown model type 'PPHumanSeg'; did you mean 'PPHumanSegLite'?",
    ]


def test_every_fault_of_a_network_is_told_and_its_heads_are_counted_all_the_same(tmp_path: Path) -> None:
    model = """model:
  type: PPLiteSeg
  backbone:
    type: STDC1
    deep: 3
  resize_mod: bilinear
  arm_out_chs: none
  align_corners: True
"""
    text = recipe_files.TEXT.replace("model:\n  type: PPHumanSegLite\n", model)
    assert [line.partition(";")[0] for line in faults(tmp_path, text)] == [
        "r.yml:34: loss: 1 coefficients, but PPLiteSeg has 3 outputs in training",
        "r.yml:39: unknown option of STDC1 'deep'",
        "r.yml:40: unknown option of PPLiteSeg 'resize_mod'",
        "r.yml:41: arm_out_chs='none'",
        "r.yml:42: PPLiteSeg: align_corners=True: only False is supported",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arm_out_chs": [32, 64]}, "arm_out_chs=[32, 64]"),
        ({"seg_head_inter_chs": [1, 2, 0]}, "seg_head_inter_chs[2]=0"),
        ({"cm_out_ch": 1.5}, "cm_out_ch=1.5"),
        ({"cm_bin_sizes": []}, "cm_bin_sizes=[]"),
        ({"backbone_indices": [1]}, "backbone_indices=[1]: only [2, 3, 4]"),
    ],
)
def test_values_of_networks_are_checked(tmp_path: Path, options: dict, message: str) -> None:
    model = {"type": "PPLiteSeg", "backbone": {"type": "STDC1"}, **options}
    loss = {"types": [{"type": "CrossEntropyLoss"}], "coef": [1, 1, 1]}
    (line,) = faults(tmp_path, changed(model=model, loss=loss))
    assert message in line


def test_a_fault_in_a_base_is_told_with_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text(recipe_files.TEXT.replace("weight_decay: 0.0005", "weight_decay: -1"))
    assert faults(tmp_path, "_base_: base.yml\niters: 0\n") == [
        "base.yml:25: sgd: weight_decay=-1",
        "r.yml:2: iters=0",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iters": None}, "r.yml: iters is missing: how many steps the run has"),
        ({"model": None}, "r.yml: model is missing, as in {type: PPLiteSeg, backbone: {type: STDC1}}"),
        ({"loss": None}, "r.yml: loss is missing, as in {types: [{type: CrossEntropyLoss}], coef: [1]}"),
        ({"lr_scheduler": None}, "r.yml: lr_scheduler is missing, as in {type: PolynomialDecay, learning_rate: 0.01}"),
        ({"model": 3}, "model: 3"),
        ({"model": {"num_classes": 2}}, "unknown model type None"),
        ({"model": {"type": "PPHumanSegLite", "pretrained": 3}}, "pretrained=3"),
        ({"model": {"type": "FCN", "backbone": {"type": "STDC1"}}}, "unknown backbone of FCN 'STDC1'"),
        (
            {"model": {"type": "PPHumanSegLite", "num_classes": 5}},
            "model has 5 classes, train_dataset has 2; they must agree",
        ),
        (
            {"model": {"type": "PPHumanSegLite", "num_classes": 900}},
            "num_classes=900",
        ),
        (
            {"train_dataset": None, "val_dataset": None},
            "num_classes is missing: neither the data set nor the model has it",
        ),
        (
            {"model": {"type": "OCRNet", "backbone": {"type": "HRNet_W18"}}},
            "loss: 1 coefficients, but OCRNet has 2 outputs",
        ),
        ({"optimizer": {"type": "sgd", "backbone_lr_mult": 0.1}}, "optimizer: no parameter for the part 'backbone'"),
        ({"optimizer": 3}, "optimizer: 3"),
        (
            {"learning_rate": {"value": 1, "decay": {"type": "polly"}}, "lr_scheduler": None},
            "unknown decay of learning_rate 'polly'; did you mean 'poly'",
        ),
        (
            {"learning_rate": 1, "lr_scheduler": None},
            "learning_rate: must have a value and a decay, or use lr_scheduler",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(tmp_path: Path, change: dict, message: str) -> None:
    assert any(message in line for line in faults(tmp_path, changed(**change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Cityscape"}, "unknown data set 'Cityscape'; did you mean 'Cityscapes'"),
        ({"dataset_rot": 1}, "unknown key of Dataset 'dataset_rot'; did you mean 'dataset_root'"),
        ({"dataset_root": 3}, "dataset_root=3"),
        ({"ignore_index": "x"}, "ignore_index='x'"),
        ({"edge": 1}, "edge=1"),
        ({"train_path": 5}, "train_path=5"),
        ({"num_classes": "two"}, "num_classes='two'"),
        ({"mode": "trian"}, "unknown mode 'trian'; did you mean 'train'"),
        ({"mode": "val"}, "Dataset: val_path is missing: mode 'val' reads that list"),
        ({"mode": "trainaug"}, "unknown mode 'trainaug'; did you mean 'train'? allowed: train, val, test"),
        ({"transforms": 3}, "train_dataset: transforms must be a list, as in [{type: Normalize}]"),
        ({"transforms": [{"type": "Normalize"}, {"type": "RandomBlur"}]}, "move Normalize to the end"),
        ({"transforms": [{"type": "Resize", "target_size": "big"}]}, "Resize: target_size='big'"),
        ({"transforms": ["Resize"]}, "transform: 'Resize'"),
    ],
)
def test_what_is_wrong_with_data_is_said_before_they_are_opened(tmp_path: Path, change: dict, message: str) -> None:
    data = changed()
    data["train_dataset"] |= change
    assert any(message in line for line in faults(tmp_path, data))


def test_data_sets_must_agree(tmp_path: Path) -> None:
    data = changed()
    data["val_dataset"]["num_classes"] = 3
    assert faults(tmp_path, data) == ["r.yml:20: val_dataset has 3 classes, train_dataset has 2; they must agree"]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yml: no such file$"):
        load_recipe(tmp_path / "gone.yml")


def places(data: Any, path: tuple = ()) -> list[tuple]:
    """Return the way to every value of plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


PLACES = [place for place in places(recipe_files.PLAIN) if place]
NONSENSE = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        3,
        1e308,
        float("nan"),
        float("inf"),
        10**40,
        "",
        "x",
        [],
        [1, "a"],
        [[]],
        {},
        {"type": "x"},
        {"a": 1},
    ]
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(PLACES), NONSENSE), min_size=1, max_size=3))
def test_nonsense_anywhere_in_a_file_loads_or_is_refused(tmp_path: Path, changes: list) -> None:
    data = copy.deepcopy(recipe_files.PLAIN)
    for place, value in changes:
        if place in places(data):
            inner: Any = data
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
    try:
        recipe = load(tmp_path, data)
    except RecipeError:
        return
    assert yaml.safe_load(yaml.safe_dump(recipe.resolved)) is not None


def test_opened_data_go_through_network_and_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("image", "label"):
        values = rng.integers(0, 256 if name == "image" else 2, (48, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f"{name}.png"), values if name == "image" else values[..., 0])
    (tmp_path / "train.txt").write_text("image.png label.png\n")
    opts = [f"train_dataset.dataset_root={tmp_path}", f"train_dataset.train_path={tmp_path}/train.txt"]
    recipe = load(tmp_path, recipe_files.TEXT, opts=opts)
    assert recipe.train_data is not None
    dataset, chain = recipe.train_data.open(), recipe.train_data.transforms
    assert (len(dataset), dataset.num_classes) == (1, 2)
    sample = chain(dataset.read(0), rng)
    assert sample.image.shape == (32, 64, 3)
    images = torch.from_numpy(sample.image).permute(2, 0, 1).float().expand(2, -1, -1, -1) / 255
    labels = torch.from_numpy(np.stack([sample.label, sample.label]))
    loss = recipe.create_loss()(recipe.create_model()(images), labels)
    assert loss.item() == pytest.approx(np.log(2), abs=0.2), "a fresh network knows nothing"


def test_all_faults_of_a_text_come_in_one_error_in_the_order_of_lines(tmp_path: Path) -> None:
    lines = faults(tmp_path, "a: 1\n2: b\na: 3\nc: !!int x\n")
    assert [line.partition(": ")[0] for line in lines] == ["r.yml:2", "r.yml:3", "r.yml:4"]


def test_thousands_of_faults_are_cut(tmp_path: Path) -> None:
    lines = faults(tmp_path, "\n".join(f"{i}: x" for i in range(1000)))
    assert (len(lines), lines[-1]) == (51, "and 950 more faults")
