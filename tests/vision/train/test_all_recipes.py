"""The eight segmentation recipes train, as they are written but for small crops, on generated data."""

from pathlib import Path

import pytest
from small_runs import losses_of, train

from mezzo.vision.lite import prepare

CONFIGS = Path(__file__).parents[3] / "test_tipc" / "configs"
# lite_cpu.yml is made by `mezzo tipc prepare`, from one of them
RECIPES = sorted(
    path for path in CONFIGS.glob("*/*.yml") if path.parent.name != "_base_" and path.name != "lite_cpu.yml"
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    prepare("mini_supervisely", root / "mini_supervisely", count=(8, 2, 2), size=(96, 96))
    prepare("cityscapes", root / "cityscapes", count=(8,), size=(256, 128))
    return root


def small(recipe: Path, sets: Path) -> list[str]:
    """Return what makes a recipe small: where the data is, and the sizes of its transforms."""
    text = recipe.read_text() + "".join(path.read_text() for path in (CONFIGS / "_base_").glob("*.yml"))
    city = "cityscapes" in recipe.name
    root = sets / ("cityscapes" if city else "mini_supervisely")
    opts = [f"{part}.dataset_root={root}" for part in ("train_dataset", "val_dataset")]
    if city:
        assert "RandomPaddingCrop" in text
        opts += ["train_dataset.transforms.1.crop_size=[128, 64]"]
    else:
        opts += ["train_dataset.train_path=train.txt", "val_dataset.val_path=val.txt"]
        opts += [f"{part}.transforms.0.target_size=[64, 64]" for part in ("train_dataset", "val_dataset")]
    return opts


def test_there_are_eight() -> None:
    assert len(RECIPES) == 8


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_recipe_trains_five_iterations(recipe: Path, sets: Path, tmp_path: Path) -> None:
    options = (
        f"--precision fp16 --amp_level O2 --iters 5 --batch_size 2 --log_iters 1 --seed 100 --save_dir {tmp_path}/out"
    )
    code = train("--config", recipe, *options.split(), "--opts", *small(recipe, sets))
    assert code == 0
    losses = [loss for _, loss in losses_of(tmp_path / "out")]
    assert len(losses) == 5
    assert all(0 < loss < 20 for loss in losses)
    assert (tmp_path / "out" / "iter_5" / "model.pdparams").exists()
