"""The eight recipes in test_tipc/configs against the table of the published training settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_files import CONFIGS, ROOT
from torch import nn

from mezzo.vision.models import create_model
from mezzo.vision.models.losses import CrossEntropyLoss, OhemCrossEntropyLoss
from mezzo.vision.recipes import Recipe, load_recipe


@dataclass(frozen=True)
class Row:
    """One line of the table: a model of the registry, and what its training uses."""

    model: str
    batch_size: int
    iters: int
    lr: float
    weight_decay: float
    loss: type
    coefs: tuple[float, ...]
    distort: float
    size: tuple[int, int]
    """Width and height of what the network is trained on."""
    crops: bool


FILES = {
    "pp_liteseg_stdc1": "pp_liteseg_stdc1/pp_liteseg_stdc1_cityscapes_1024x512_160k",
    "pp_liteseg_stdc2": "pp_liteseg_stdc2/pp_liteseg_stdc2_cityscapes_1024x512_160k",
    "fcn_hrnet_w18": "fcn_hrnetw18/fcn_hrnetw18_1024x512_cityscapes",
    "ocrnet_hrnetw18": "ocrnet_hrnetw18/ocrnet_hrnetw18_cityscapes_1024x512_160k",
    "ocrnet_hrnetw48": "ocrnet_hrnetw48/ocrnet_hrnetw48_cityscapes_1024x512",
    "pp_humanseg_lite": "pphumanseg_lite/pphumanseg_lite_mini_supervisely",
    "pp_humanseg_mobile": "fcn_hrnetw18_small/fcn_hrnetw18_small_v1_humanseg_192x192_mini_supervisely",
    "pp_humanseg_server": "deeplabv3p_resnet50/deeplabv3p_resnet50_humanseg_512x512_mini_supervisely",
}
TABLE = """
pp_liteseg_stdc1    4  160000  0.005   5e-4  ohem  1,1,1  crop    1024x512  0.4
pp_liteseg_stdc2    4  160000  0.005   5e-4  ohem  1,1,1  crop    1024x512  0.4
fcn_hrnet_w18       2   80000  0.01    5e-4  ce    1      crop    1024x512  0.5
ocrnet_hrnetw18     2  160000  0.01    4e-5  ce    1,0.4  crop    1024x512  0.4
ocrnet_hrnetw48     2     500  0.01    4e-5  ce    1,0.4  crop    1024x512  0.4
pp_humanseg_lite    8    2000  0.0075  5e-4  ce    1      resize   398x224  0.4
pp_humanseg_mobile 64    2000  0.05    5e-4  ce    1      resize   192x192  0.4
pp_humanseg_server 64    2000  0.05    5e-4  ce    1      resize   512x512  0.4
"""


def read_row(line: str) -> Row:
    """Return a line of the table: batch, steps, rate, decay, loss and its coefficients, sizes, colours."""
    model, batch, iters, lr, decay, loss, coefs, kind, size, distort = line.split()
    width, height = size.split("x")
    return Row(
        model=model,
        batch_size=int(batch),
        iters=int(iters),
        lr=float(lr),
        weight_decay=float(decay),
        loss={"ohem": OhemCrossEntropyLoss, "ce": CrossEntropyLoss}[loss],
        coefs=tuple(float(coef) for coef in coefs.split(",")),
        crops=kind == "crop",
        size=(int(width), int(height)),
        distort=float(distort),
    )


ROWS = [read_row(line) for line in TABLE.strip().splitlines()]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)


def load(row: Row, **options: Any) -> Recipe:
    return load_recipe(CONFIGS / f"{FILES[row.model]}.yml", **options)


def test_the_table_has_every_recipe() -> None:
    assert [row.model for row in ROWS] == list(FILES)
    files = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yml")}
    made = {
        name for name in files if name.startswith("_base_/") or name.endswith("/lite_cpu")
    }  # by `mezzo tipc prepare`
    assert files - made == set(FILES.values())


@each_row
def test_numbers_are_those_of_the_table(row: Row) -> None:
    recipe = load(row)
    assert (recipe.batch_size, recipe.iters, recipe.epochs) == (row.batch_size, row.iters, None)
    optimizer = recipe.optimizer
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, row.weight_decay)
    assert (optimizer.parts, optimizer.clip_norm) == ((), None)
    assert recipe.train_size == (row.size[1], row.size[0])
    rates = [row.lr * (1 - step / row.iters) ** 0.9 for step in (0, row.iters // 3, row.iters)]
    assert [recipe.schedule.lr(step) for step in (0, row.iters // 3, row.iters)] == pytest.approx(rates)
    assert recipe.ignored == ()


@each_row
def test_losses_are_those_of_the_table(row: Row) -> None:
    loss = load(row).create_loss()
    assert loss.coefs == row.coefs
    assert {type(part) for part in loss.losses} == {row.loss}
    if row.loss is OhemCrossEntropyLoss:
        assert {(part.threshold, part.min_kept) for part in loss.losses} == {(0.7, 130000)}


@each_row
def test_transforms_are_those_of_the_table(row: Row) -> None:
    recipe = load(row)
    assert recipe.train_data is not None
    assert recipe.val_data is not None
    chain = recipe.train_data.transforms
    names = [type(item).__name__ for item in chain.on_host]
    first = ["ResizeStepScaling", "RandomPaddingCrop"] if row.crops else ["Resize"]
    assert names == [*first, "RandomHorizontalFlip", "RandomDistort"]
    sized: Any = chain.on_host[1 if row.crops else 0]
    assert tuple(sized.crop_size if row.crops else sized.target_size) == row.size
    if row.crops:
        scaling: Any = chain.on_host[0]
        assert (scaling.min_scale_factor, scaling.max_scale_factor, scaling.scale_step_size) == (0.5, 2.0, 0.25)
    flip: Any = chain.on_host[-2]
    colour: Any = chain.on_host[-1]
    assert flip.prob == 0.5
    assert (colour.brightness_range, colour.contrast_range, colour.saturation_range) == (row.distort,) * 3
    val = recipe.val_data.transforms
    assert [type(item).__name__ for item in val.on_host] == ([] if row.crops else ["Resize"])
    for normalize in (chain.normalize, val.normalize):
        assert normalize is not None
        assert (tuple(normalize.mean), tuple(normalize.std)) == ((0.5,) * 3, (0.5,) * 3)


@each_row
def test_the_network_is_that_of_the_registry(row: Row) -> None:
    with torch.device("meta"):
        made, own = load(row).create_model(), create_model(row.model)
    assert {k: v.shape for k, v in made.state_dict().items()} == {k: v.shape for k, v in own.state_dict().items()}
    convs = [[(c.stride, c.padding, c.dilation) for c in m.modules() if isinstance(c, nn.Conv2d)] for m in (made, own)]
    assert convs[0] == convs[1]


@each_row
def test_resolved_settings_load_again_to_the_same(row: Row, tmp_path: Path) -> None:
    first = load(row, iters=7, batch_size=2)
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(first.resolved, sort_keys=False))
    again = load_recipe(path)
    assert again.resolved == first.resolved
    assert (again.iters, again.batch_size, again.schedule.lr(7)) == (7, 2, 0)


def test_recipes_read_the_data_that_the_documents_prepare() -> None:
    roots = {load(row).resolved["train_dataset"]["dataset_root"] for row in ROWS}
    assert roots == {"test_tipc/data/cityscapes", "test_tipc/data/mini_supervisely"}
    assert (ROOT / "test_tipc").is_dir()
