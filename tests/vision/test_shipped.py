"""The recipes that come with mezzo: found by name, and written where the documents have them."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mezzo.cli import run
from mezzo.vision.models import create_model, list_models, model_info
from mezzo.vision.recipes import load_recipe
from mezzo.vision.shipped import (
    RECIPES,
    UnknownRecipe,
    find_recipe,
    recipe_file,
    shipped_tree,
    text_file,
    text_name,
    write_recipe,
)

ROOT = Path(__file__).parents[2]


def test_the_names_are_the_folders_of_the_repository() -> None:
    folders = sorted(path.name for path in (ROOT / "test_tipc" / "configs").iterdir() if path.name[0] != "_")
    assert list(RECIPES) == folders
    assert shipped_tree() == ROOT


@pytest.mark.parametrize("name", list_models())
def test_every_network_has_a_recipe_under_its_name_and_aliases(name: str) -> None:
    info = model_info(name)
    (recipe,) = {find_recipe(each) for each in (name, *info.aliases)}
    if info.task == "segmentation":
        loaded = load_recipe(recipe_file(name))
        with torch.device("meta"):  # names are enough
            network, wanted = loaded.create_model(), create_model(name, num_classes=loaded.num_classes)
        assert network.state_dict().keys() == wanted.state_dict().keys()
    else:
        with pytest.raises(UnknownRecipe, match=f"--model {name} and --data-path"):
            recipe_file(name)
    assert text_name(Path(recipe)).startswith(f"test_tipc/configs/{recipe}/train_")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["train", "--recipe", "pp_humanseg_lit"], "pphumanseg_lite"),
        (["eval", "--recipe", "ocrnet_hrnetw19"], "ocrnet_hrnetw18"),
        (["export", "--recipe", "fcn_hrnetw"], "fcn_hrnetw18"),
        (["tipc", "plan", "pp_humanseg_lit"], "pphumanseg_lite"),
        (["tipc", "run", "pp_liteseg_stdc3"], "pp_liteseg_stdc"),
        (["tipc", "lint", "mobilenet_v3_smal"], "mobilenet_v3_small"),
        (["tipc", "prepare", "mobilenet_v3"], "mobilenet_v3_small"),
        (["tipc", "matrix", "pphumanseg"], "pphumanseg_lite"),
        (["tipc", "plan", "pphumanseg_lite/train_infer_pyton"], "train_infer_python"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(
    arguments: list[str],
    nearest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"did you mean '{nearest}" in message
    assert list(tmp_path.iterdir()) == []


def test_config_and_recipe_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--config", "a.yml", "--recipe", "pphumanseg_lite"]) == 2
    assert "--recipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_written_is_all_that_the_commands_name(name: str, tmp_path: Path) -> None:
    written = {path.relative_to(tmp_path).as_posix() for path in write_recipe(name, tmp_path)}
    named = set()
    for text in (tmp_path / "test_tipc" / "configs" / name).glob("*.txt"):
        for line in text.read_text().splitlines():
            words = shlex.split(line.partition(":")[2], comments=False) if ".py " in line or ".py" in line else []
            named |= {word for word in words if word.endswith((".py", ".yml"))}
    assert named
    assert named <= written
    for path in (tmp_path / "test_tipc" / "configs" / name).glob("*.yml"):
        load_recipe(path)  # with its bases


def test_files_that_exist_are_kept_and_used(tmp_path: Path) -> None:
    own = tmp_path / text_name(Path("pphumanseg_lite"))
    assert text_file(Path("pphumanseg_lite"), tmp_path).is_absolute()
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    write_recipe("pphumanseg_lite", tmp_path)
    assert own.read_text() == "mine"
    assert tmp_path / text_file(Path("pphumanseg_lite"), tmp_path) == own
    assert write_recipe("pphumanseg_lite", tmp_path) == []


def test_a_plan_by_name_in_an_empty_folder_is_that_of_the_repository_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def commands(*arguments: str) -> str:
        assert run(["tipc", "plan", *arguments, "--compat", "--format", "shell"]) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(ROOT)
    wanted = commands("test_tipc/configs/pphumanseg_lite/train_infer_python.txt", "lite_train_lite_infer")
    monkeypatch.chdir(tmp_path)
    assert commands("pp_humanseg_lite/train_infer_python").replace(str(tmp_path), str(ROOT)) == wanted
    assert run(["tipc", "plan", "pp_humanseg_lite"]) == 0
    assert "mezzo tipc prepare pp_humanseg_lite" in capsys.readouterr().out
    assert run(["tipc", "lint", "pp_humanseg_lite"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_finding_a_recipe_does_not_import_torch() -> None:
    code = "import sys, mezzo.vision.shipped as s; s.recipe_file('pp_liteseg_t'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
