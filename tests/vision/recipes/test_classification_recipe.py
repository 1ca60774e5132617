"""The classification command line as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

from mezzo.vision.recipes import ClassifierOptions, RecipeError, classification_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, one of them without an image."""
    for split in ("train", "val"):
        for name in ("ant", "bee", "cat"):
            (tmp_path / split / name).mkdir(parents=True)
        for name in ("ant", "cat"):
            cv2.imwrite(str(tmp_path / split / name / "x.png"), np.full((40, 30, 3), 99, np.uint8))
    return tmp_path


def test_the_documented_defaults(folder: Path) -> None:
    recipe = classification_recipe(ClassifierOptions(data_path=folder))
    assert (recipe.task, recipe.model.name, recipe.num_classes) == ("classification", "mobilenet_v3_small", 3)
    assert (recipe.batch_size, recipe.epochs, recipe.iters) == (256, 90, None)
    optimizer = recipe.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    rates = [recipe.schedule.lr(epoch * 5, 5) for epoch in (0, 29, 30, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])


def test_images_go_through_the_documented_transforms(folder: Path) -> None:
    recipe = classification_recipe(
        ClassifierOptions(data_path=folder, auto_augment="ra", random_erase=0.25, image_size=32, resize_size=36)
    )
    assert recipe.train_data is not None
    assert recipe.val_data is not None
    train, val = recipe.train_data.transforms, recipe.val_data.transforms
    names = [[type(item).__name__ for item in chain.on_host] for chain in (train, val)]
    assert names == [
        ["RandomResizedCrop", "RandomHorizontalFlip", "AutoAugment", "RandomErase"],
        ["ResizeShort", "CenterCrop"],
    ]
    rng = np.random.default_rng(0)
    for data, chain in ((recipe.train_data, train), (recipe.val_data, val)):
        dataset = data.open()
        assert (len(dataset), dataset.num_classes) == (2, 3)
        sample = chain(dataset.read(1), rng)
        assert (sample.image.shape, sample.image.dtype, sample.label) == ((32, 32, 3), np.uint8, 2)
        assert chain.normalize is not None
        assert tuple(chain.normalize.mean) == (0.485, 0.456, 0.406)
        assert tuple(chain.normalize.std) == (0.229, 0.224, 0.225)


def test_plain_training_has_no_augmentation_beside_crop_and_flip(folder: Path) -> None:
    recipe = classification_recipe(ClassifierOptions(data_path=folder))
    assert recipe.train_data is not None
    names = [type(item).__name__ for item in recipe.train_data.transforms.on_host]
    assert names == ["RandomResizedCrop", "RandomHorizontalFlip"]


def test_network_and_loss_have_the_classes_of_the_data(folder: Path) -> None:
    recipe = classification_recipe(ClassifierOptions(data_path=folder))
    with torch.device("meta"):
        model = recipe.create_model()
    assert model.classifier[-1].out_features == 3
    loss = recipe.create_loss()(torch.zeros(2, 3), torch.tensor([0, 2]))
    assert loss.item() == pytest.approx(np.log(3))


def test_given_classes_need_no_data(tmp_path: Path) -> None:
    assert classification_recipe(ClassifierOptions(data_path=tmp_path / "gone", num_classes=7)).num_classes == 7


def test_given_classes_let_val_be_evaluated_without_train(folder: Path) -> None:
    (folder / "train").rename(folder / "elsewhere")
    recipe = classification_recipe(ClassifierOptions(data_path=folder, num_classes=5))
    assert recipe.val_data is not None
    dataset = recipe.val_data.open()
    assert (len(dataset), dataset.num_classes, [dataset.read(i).label for i in range(2)]) == (2, 5, [0, 2])


def test_classes_of_val_are_counted_like_those_of_train(folder: Path) -> None:
    (folder / "val" / "bee").rmdir()
    recipe = classification_recipe(ClassifierOptions(data_path=folder))
    assert recipe.val_data is not None
    dataset = recipe.val_data.open()
    assert [dataset.read(i).label for i in range(len(dataset))] == [0, 2], "ant and cat, as in train"


@pytest.mark.parametrize(
    ("opt", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("rmsprop", torch.optim.RMSprop),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_optimizers_by_name(tmp_path: Path, opt: str, kind: type) -> None:
    recipe = classification_recipe(ClassifierOptions(data_path=tmp_path, num_classes=2, opt=opt))
    assert type(recipe.optimizer.create(torch.nn.Linear(1, 1))) is kind


def test_resolved_settings_are_plain_and_call_the_same_recipe_again(folder: Path) -> None:
    first = classification_recipe(ClassifierOptions(data_path=folder, lr=0.2, epochs=3))
    settings = yaml.safe_load(yaml.safe_dump(first.resolved))
    assert settings == first.resolved
    assert settings.pop("task") == "classification"
    again = classification_recipe(ClassifierOptions(**settings))
    assert again.resolved == first.resolved
    assert (again.optimizer, again.schedule, again.model) == (first.optimizer, first.schedule, first.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "mobilenet"}, "--model: unknown classifier 'mobilenet'; did you mean 'mobilenet_v3_small'"),
        ({"model": "pp_humanseg_lite"}, "--model: unknown classifier 'pp_humanseg_lite'"),
        ({"opt": "sdg"}, "--opt: unknown optimizer 'sdg'; did you mean 'sgd'"),
        ({"lr": 0}, "--lr: lr=0"),
        ({"batch_size": 0}, "--batch-size: batch_size=0"),
        ({"epochs": 0}, "--epochs: epochs=0"),
        ({"num_classes": 0}, "--num-classes: num_classes=0"),
        ({"momentum": 1}, "--momentum: momentum=1"),
        ({"weight_decay": -1}, "--wd: weight_decay=-1"),
        ({"lr_step_size": 0}, "--lr-step-size: lr_step_size=0"),
        ({"lr_gamma": 2}, "--lr-gamma: lr_gamma=2"),
        ({"auto_augment": "random"}, "--auto-augment: AutoAugment: unknown policy 'random'"),
        ({"random_erase": 2}, "--random-erase: RandomErase: probability=2"),
        ({"image_size": 0}, "--image-size: .*size=0"),
        ({"resize_size": -3}, "--resize-size: ResizeShort: size=-3"),
        ({"std": (0, 1, 1)}, "--mean, --std: Normalize: std"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_at_the_option(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        classification_recipe(ClassifierOptions(**{"data_path": tmp_path, "num_classes": 2, **options}))


def test_all_options_are_checked_before_any_data_are_opened(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        classification_recipe(ClassifierOptions(data_path=tmp_path / "gone", lr=-1, epochs=0, opt="x"))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["--epochs", "--lr", "--opt"]
