"""Preparation: data in their place whole or not at all, real sets linked or fetched, hostile archives refused."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tipc_plans import CONFIG, EXAMPLES

from archives import tar_of, zip_of
from mezzo.checkpoint import save_pdparams
from mezzo.errors import MezzoError, RunError
from mezzo.fetch import FetchError, _download, place_of
from mezzo.files import Bounds, FileError
from mezzo.tipc import PROFILES, Allowances, PreparedFiles, adapt_plan, make_plan, prepare
from mezzo.tipc._datasets import DATASETS
from mezzo.tipc._weights import PUBLISHED
from mezzo.vision.data import DataError
from mezzo.vision.lite import LITE_MARKER as GENERATED
from mezzo.vision.lite import prepare as generate
from mezzo.vision.models import count_classes, create_model, load_trained
from mezzo.vision.recipes import RecipeError, load_recipe

REPOSITORY = Path(__file__).parents[2]
LITE, WHOLE, INFER = "lite_train_lite_infer", "whole_train_whole_infer", "whole_infer"
SMALL = {
    "imagenet_lite": {"count": (2, 1), "size": (32, 32)},
    "mini_supervisely": {"count": (3, 2, 2), "size": (64, 48)},
    "cityscapes": {"count": (3,), "size": (128, 64)},
}
MODEL_OF = {"imagenet_lite": "mobilenet_v3_small", "mini_supervisely": "pphumanseg_lite", "cityscapes": "fcn_hrnetw18"}
FOLDER_OF = {name: f"test_tipc/data/{'lite_data' if name == 'imagenet_lite' else name}" for name in SMALL}
MINI = FOLDER_OF["mini_supervisely"]

GENERATOR_OF = {model: generator for generator, model in MODEL_OF.items()}
TRAIN_BY = {"imagenet_lite": "train.py --data-path=test_tipc/data/lite_data"}
LISTS = """  type: Dataset
  num_classes: 19
  train_path: test_tipc/data/mini_supervisely/train.txt
  val_path: test_tipc/data/mini_supervisely/val.txt
  dataset_root: test_tipc/data/mini_supervisely
"""
TREE = """  type: Cityscapes
  dataset_root: test_tipc/data/cityscapes
"""
RECIPE = """\
batch_size: 4
iters: 100
train_dataset:
DATA  mode: train
  transforms:
    - type: RandomPaddingCrop
      crop_size: [1024, 512]
    - type: Normalize
val_dataset:
DATA  mode: val
  transforms:
    - type: Normalize
model: {type: PPLiteSeg, backbone: {type: STDC1}}
loss: {types: [{type: CrossEntropyLoss}], coef: [1, 1, 1]}
optimizer: {type: sgd}
lr_scheduler: {type: PolynomialDecay, learning_rate: 0.01}
"""


def text_of(model: str, generator: str = "cityscapes") -> str:
    """Return a text of 52 lines whose commands read a kind of data."""
    export = "tools/export.py --config configs/net.yml"
    normal = "null" if generator in TRAIN_BY else export
    changes = {
        "model_name:net": f"model_name:{model}",
        "train_infer_img_dir:img": "train_infer_img_dir:configs",
        "tools/train.py --config configs/net/net.yml": TRAIN_BY.get(generator, "train.py --config configs/net.yml"),
        "norm_export:tools/export.py --config configs/net/net.yml": f"norm_export:{normal}",
        "infer_model:null": "infer_model:./weights/a.pdparams|./weights/b.pdparams",
        "infer_export:null": f"infer_export:{export}|{export}",
        "--image_path:img": "--image_path:configs",
    }
    text = CONFIG
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of a few images, so that a test takes no time."""
    small = tuple(replace(dataset, options=SMALL[dataset.generator]) for dataset in DATASETS)
    monkeypatch.setattr("mezzo.tipc._datasets.DATASETS", small)
    monkeypatch.setattr(_download, "PAUSES_S", (0, 0))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., PreparedFiles]:
    """Prepare in an empty repository."""

    def call(model: str = "pphumanseg_lite", mode: str = LITE, **options) -> PreparedFiles:
        config = Path("configs") / "text.txt"
        (tmp_path / "configs").mkdir(exist_ok=True)
        generator = GENERATOR_OF.get(model, "cityscapes")
        (tmp_path / config).write_text(text_of(model, generator))
        data = LISTS if generator == "mini_supervisely" else TREE
        (tmp_path / "configs/net.yml").write_text(RECIPE.replace("DATA", data.rstrip("\n") + "\n"))
        return prepare(config, mode, **{"root": tmp_path, "has_gpu": True, "profile": "mezzo", **options})

    return call


def fingerprint(root: Path) -> dict[str, tuple[str, int]]:
    """Return what every file holds, and when it was written."""
    return {
        str(path.relative_to(root)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def hidden(folder: Path) -> list[str]:
    """Return what lies beside the sets and is no lock."""
    return sorted(path.name for path in folder.glob(".*") if not path.name.endswith(".lock"))


# Generated data


@pytest.mark.parametrize("generator", SMALL)
def test_every_form_of_data_is_generated_and_looks_like_the_set(tmp_path, run, generator):
    said: list[str] = []
    prepared = run(MODEL_OF[generator], report=said.append)
    folder = tmp_path / FOLDER_OF[generator]
    dataset = next(each for each in DATASETS if each.generator == generator)
    assert prepared.folders == (folder,)
    assert dataset.first_missing(folder) is None
    (notice,) = prepared.notices
    assert "generated data" in notice
    assert "--data DIR" in notice
    assert said[-1] == notice
    assert hidden(folder.parent) == []


def test_documented_files_for_inference_are_there(tmp_path, run):
    for model in MODEL_OF.values():
        run(model)
    for file in ("mini_supervisely/test.txt", "cityscapes/cityscapes_val_5.list", "lite_data/test/demo.jpg"):
        assert (tmp_path / "test_tipc/data" / file).is_file()


def test_second_run_touches_nothing(tmp_path, run):
    run()
    before = fingerprint(tmp_path / MINI)
    again = run()
    assert again.folders == ()
    assert len(again.notices) == 1
    assert fingerprint(tmp_path / MINI) == before


def test_data_are_found_by_the_commands_whatever_the_model_is_called(tmp_path, run):
    assert run("my_net").folders == (tmp_path / FOLDER_OF["cityscapes"],)


def test_what_a_killed_run_left_is_removed_and_made_anew(tmp_path, run):
    left = tmp_path / "test_tipc/data/.mini_supervisely.unfinished/set/Images"
    left.mkdir(parents=True)
    (left / "half.png").write_bytes(b"half")
    run()
    assert hidden(tmp_path / "test_tipc/data") == []
    assert not list((tmp_path / MINI).rglob("half.png"))


def test_failure_while_drawing_leaves_nothing(tmp_path, run, monkeypatch):
    def fail(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mezzo.tipc._data_folder.generate", fail)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / MINI).exists()
    assert hidden(tmp_path / "test_tipc/data") == []


def test_generated_set_with_files_missing_is_made_anew(tmp_path, run):
    run()
    before = {name: value for name, (value, _) in fingerprint(tmp_path / MINI).items()}
    (tmp_path / MINI / "val.txt").unlink()
    assert run().folders == (tmp_path / MINI,)
    assert {name: value for name, (value, _) in fingerprint(tmp_path / MINI).items()} == before


def test_empty_folder_is_filled(tmp_path, run):
    (tmp_path / MINI).mkdir(parents=True)
    assert run().folders == (tmp_path / MINI,)


def test_set_of_the_user_is_used_and_never_changed(tmp_path, run):
    generate("mini_supervisely", tmp_path / MINI, **SMALL["mini_supervisely"])
    (tmp_path / MINI / ".mezzo-lite.json").unlink()
    before = fingerprint(tmp_path / MINI)
    for mode in (LITE, WHOLE):
        assert run(mode=mode).notices == (f"{MINI}: the set that is there is used",)
    assert fingerprint(tmp_path / MINI) == before


def test_folder_with_something_else_is_refused(tmp_path, run):
    (tmp_path / MINI).mkdir(parents=True)
    (tmp_path / MINI / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=f"{MINI}: was not made by this command, and is no .*: no .*train.txt; move it"):
        run()
    assert (tmp_path / MINI / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_two_processes_make_one_set(tmp_path, run):
    run()
    shutil.rmtree(tmp_path / MINI)
    code = (
        "from pathlib import Path; from mezzo.tipc import prepare; import sys\n"
        "root = Path(sys.argv[1])\n"
        "made = prepare(root / 'configs/text.txt', 'lite_train_lite_infer', root=root, has_gpu=True, profile='mezzo')\n"
        "print(len(made.folders))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert sorted(process.communicate()[0].strip() for process in both) == ["0", "1"]


TUTORIAL = "\n".join(
    [
        *("===train_params===", "model_name:my_net", "python:python3.7", "gpu_list:0|0,1", "use-gpu:True|True"),
        *("--epochs:lite_train_lite_infer=5", "--output-dir:./output/", "--batch-size:lite_train_lite_infer=4"),
        *(
            "--pretrained:null",
            "train_model_name:latest.pdparams",
            "--data-path:./lite_data",
            "##",
            "trainer:amp_train",
        ),
        *("amp_train:train.py --amp_level=O2", "##", "===eval_params===", "eval:train.py --test-only", "##"),
        *("===infer_params===", "--save-inference-dir:./output/infer/", "--pretrained:"),
        *("norm_export:tools/export_model.py --model=mobilenet_v3_small", "##", "train_model:./w/w.pdparams"),
        *("infer_export:tools/export_model.py", "##", "inference:deploy/inference_python/infer.py"),
        *("--use-gpu:True|False", "--batch-size:1", "--model-dir:./output/infer/", "--img-path:./images/demo.jpg"),
        "--benchmark:True",
    ]
)


def test_the_tutorial_s_text_gets_its_data_where_its_commands_look(tmp_path):
    (tmp_path / "x.txt").write_text(TUTORIAL)
    for _ in range(2):  # the second run finds everything in place
        prepare(Path("x.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo-tutorial")
    assert (tmp_path / "data").readlink() == Path("lite_data")
    assert len(list((tmp_path / "data/train").iterdir())) == 16
    assert (tmp_path / "images/demo.jpg").is_file()


def test_data_and_images_of_the_user_stay(tmp_path):
    (tmp_path / "x.txt").write_text(TUTORIAL)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/demo.jpg").write_bytes(b"mine")
    (tmp_path / "data/train").mkdir(parents=True)
    notices = prepare(Path("x.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo-tutorial").notices
    assert any("./data holds training images" in line for line in notices)
    assert (tmp_path / "images/demo.jpg").read_bytes() == b"mine"
    assert not (tmp_path / "data").is_symlink()


def test_a_link_of_ours_gives_way_and_anything_else_in_its_place_is_said(tmp_path):
    def again(text: str = TUTORIAL) -> PreparedFiles:
        (tmp_path / "x.txt").write_text(text)
        return prepare(Path("x.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo-tutorial")

    again()
    again(TUTORIAL.replace("./lite_data", "./other"))
    assert (tmp_path / "data").readlink() == Path("other")
    (tmp_path / "data").unlink()
    (tmp_path / "data").symlink_to("disk that is not mounted")
    again()
    assert (tmp_path / "data").readlink() == Path("disk that is not mounted")
    (tmp_path / "data").unlink()
    (tmp_path / "data").write_text("mine")
    again()  # train.py finds ./lite_data by itself
    with pytest.raises(DataError, match=r"--data-path=\./other"):
        again(TUTORIAL.replace("./lite_data", "./other"))
    assert (tmp_path / "data").read_text() == "mine"


def test_a_text_that_names_no_data_is_refused(tmp_path, run):
    run()
    text = text_of("x").replace("train.py --config configs/net.yml", "main.py -c net.yml")
    (tmp_path / "configs/text.txt").write_text(text.replace("--config configs/net.yml", ""))
    with pytest.raises(DataError, match="--data-path DIR"):
        prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=True, profile="mezzo")


@pytest.mark.parametrize("profile", sorted({each["profile"] for each in EXAMPLES}))
def test_texts_of_other_repositories_get_no_data_that_they_do_not_ask_for(tmp_path, profile):
    """Their recipes are not there, or they name none: one line, and nothing is made."""
    for example in (each for each in EXAMPLES if each["profile"] == profile):
        (tmp_path / "x.txt").write_text(example["config"])
        if PROFILES[profile].layout != "tutorial-32" and "--data-path" not in example["config"]:
            with pytest.raises(MezzoError):
                prepare(Path("x.txt"), LITE, root=tmp_path, has_gpu=True, profile=profile)
            assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_an_unused_trainer_s_recipe_is_not_needed(tmp_path, run):
    run()
    text = text_of("x").replace("fpgm_train:null", "fpgm_train:train.py --config gone.yml")
    (tmp_path / "configs/text.txt").write_text(text)
    prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=True, profile="mezzo")


def test_two_blanks_after_an_option_change_nothing(tmp_path, run):
    run("fcn_hrnetw18")
    (tmp_path / "configs/text.txt").write_text(text_of("x").replace("--config ", "--config  "))
    notices = prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=True, profile="mezzo").notices
    assert any("in the form of Cityscapes" in line for line in notices)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("place", ["../out/set", "{outside}/set", "leads/out"])
def test_nothing_is_written_outside_of_the_repository(tmp_path, place):
    root, outside = tmp_path / "root", tmp_path / "out"
    root.mkdir()
    outside.mkdir()
    (root / "leads").symlink_to(outside)
    place = place.format(outside=outside)
    for old in ("./lite_data", "./images/demo.jpg"):
        (root / "x.txt").write_text(TUTORIAL.replace(old, place + (".jpg" if "images" in old else "")))
        with pytest.raises(DataError, match="outside"):
            prepare(Path("x.txt"), LITE, root=root, has_gpu=False, profile="mezzo-tutorial")
    assert not list(outside.iterdir())


def test_a_file_where_the_data_belong_is_not_touched(tmp_path):
    (tmp_path / "x.txt").write_text(TUTORIAL)
    (tmp_path / "lite_data").write_text("my thesis")
    with pytest.raises(DataError, match="not made by this command"):
        prepare(Path("x.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo-tutorial")
    assert (tmp_path / "lite_data").read_text() == "my thesis"


@pytest.mark.parametrize("marker", [b"", b"{", b"\xff"])
def test_a_folder_with_a_damaged_marker_is_not_ours(tmp_path, run, marker):
    (tmp_path / MINI).mkdir(parents=True)
    (tmp_path / MINI / ".mezzo-source.json").write_bytes(marker)
    with pytest.raises(DataError, match="not made by this command"):
        run()
    assert (tmp_path / MINI / ".mezzo-source.json").read_bytes() == marker


def test_a_complete_set_in_a_folder_that_cannot_be_written_is_used(tmp_path, run, monkeypatch):
    make_real("mini_supervisely", tmp_path / MINI)
    monkeypatch.setattr(
        "mezzo.tipc._data_folder.locked", lambda path: pytest.fail("something is written beside the set")
    )
    assert run().notices == (f"{MINI}: the set that is there is used",)


def test_data_of_a_type_that_is_not_drawn_must_be_there(tmp_path, run):
    run("fcn_hrnetw18")
    recipe = (tmp_path / "configs/net.yml").read_text().replace("Cityscapes", "ADE20K").replace("cityscapes", "ade")
    recipe = recipe.replace("PPLiteSeg,", "PPLiteSeg, num_classes: 150,")
    (tmp_path / "configs/net.yml").write_text(recipe)

    def again() -> PreparedFiles:
        return prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=True, profile="mezzo")

    with pytest.raises(DataError, match="test_tipc/data/ade is missing"):
        again()
    (tmp_path / "test_tipc/data/ade").mkdir()
    assert "the set that is there is used" in again().notices[0]


def test_lists_under_other_names_are_used_and_never_drawn(tmp_path, run):
    run()
    text = (tmp_path / "configs/net.yml").read_text().replace("data/mini_supervisely", "data/own")
    (tmp_path / "configs/net.yml").write_text(text.replace("own/train.txt", "own/my_train.txt"))

    def again() -> PreparedFiles:
        return prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=True, profile="mezzo")

    with pytest.raises(DataError, match=r"own/my_train\.txt"):
        again()
    assert not (tmp_path / "test_tipc/data/own").exists()
    (tmp_path / "test_tipc/data/own").mkdir()
    for name in ("my_train.txt", "val.txt"):
        (tmp_path / "test_tipc/data/own" / name).write_text("a.jpg a.png\n")
    assert "the set that is there is used" in again().notices[0]


def test_text_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(MezzoError, match=r"cannot read configuration: .*gone\.txt: no such file"):
        prepare(Path("gone.txt"), LITE, root=tmp_path, has_gpu=True)


# The real set, pointed to


def make_real(generator: str, folder: Path) -> Path:
    """Make a folder that passes for a user's real set."""
    generate(generator, folder, **SMALL[generator])
    (folder / ".mezzo-lite.json").unlink()
    return folder


@pytest.mark.parametrize("mode", [LITE, WHOLE])
def test_real_set_is_linked_and_not_written_to(tmp_path, run, mode):
    real = make_real("cityscapes", tmp_path / "real")
    (real / "cityscapes_val_5.list").unlink()
    before = fingerprint(real)
    prepared = run("fcn_hrnetw18", mode, data=real)
    folder = tmp_path / FOLDER_OF["cityscapes"]
    assert prepared.notices == (f"{FOLDER_OF['cityscapes']}: Cityscapes of {real}",)
    assert (folder / "leftImg8bit").resolve() == real / "leftImg8bit"
    lines = (folder / "cityscapes_val_5.list").read_text().splitlines()
    assert len(lines) == 5
    assert all((folder / name).is_file() for line in lines for name in line.split())
    assert fingerprint(real) == before


def test_imagenet_gets_a_demo_image_beside_its_own_test_images(tmp_path, run):
    real = make_real("imagenet_lite", tmp_path / "real")
    (real / "test/demo.jpg").rename(real / "test/ILSVRC2012_test_1.JPEG")
    before = fingerprint(real)
    run("mobilenet_v3_small", WHOLE, data=real)
    demo = tmp_path / FOLDER_OF["imagenet_lite"] / "test/demo.jpg"
    assert demo.read_bytes() in [path.read_bytes() for path in (real / "val").rglob("*.JPEG")]
    assert fingerprint(real) == before


def test_imagenet_by_lists_gets_its_demo_image_from_the_list(tmp_path, run):
    real = make_real("imagenet_lite", tmp_path / "real")
    image = next((real / "train").rglob("*.JPEG"))
    (real / "images").mkdir()
    image.rename(real / "images/a b.JPEG")
    for folder in ("train", "val", "test"):
        (real / folder).rename(tmp_path / f"away_{folder}")
    for split in ("train", "val"):
        (real / f"{split}_list.txt").write_text("images/a b.JPEG 3\n")
    run("mobilenet_v3_small", WHOLE, data=real)
    demo = tmp_path / FOLDER_OF["imagenet_lite"] / "test/demo.jpg"
    assert demo.read_bytes() == (real / "images/a b.JPEG").read_bytes()


def test_imagenet_without_a_single_image_is_refused(tmp_path, run):
    for split in ("train", "val"):
        (tmp_path / "real" / split / "a").mkdir(parents=True)
        (tmp_path / "real" / split / "a/readme.md").write_text("no image")
    with pytest.raises(DataError, match="val: no image in it"):
        run("mobilenet_v3_small", WHOLE, data=tmp_path / "real")
    assert not (tmp_path / FOLDER_OF["imagenet_lite"]).exists()


def test_real_set_replaces_a_generated_one_and_stays_for_lite_runs(tmp_path, run):
    run()
    real = make_real("mini_supervisely", tmp_path / "real")
    assert run(mode=WHOLE, data=real).folders == (tmp_path / MINI,)
    assert (tmp_path / MINI / "Images").is_symlink()
    assert run(mode=WHOLE, data=real).folders == ()  # it is there
    assert run(mode=WHOLE).notices == run(mode=LITE).notices == (f"{MINI}: the set that is there is used",)
    assert hidden(tmp_path / "test_tipc/data") == []
    assert len(list((real / "Images").iterdir())) == 7  # links were replaced, not what they lead to


def test_links_to_a_set_that_is_gone_give_way_to_generated_data(tmp_path, run):
    real = make_real("mini_supervisely", tmp_path / "real")
    run(data=real)
    real.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="in test_tipc/data/mini_supervisely there is no such set"):
        run(mode=WHOLE)
    assert run(mode=LITE).folders == (tmp_path / MINI,)


def test_set_that_lies_where_it_belongs_is_accepted_as_source(tmp_path, run):
    real = make_real("mini_supervisely", tmp_path / MINI)
    before = fingerprint(real)
    assert run(mode=WHOLE, data=real).folders == ()
    assert fingerprint(real) == before


def test_set_of_the_user_does_not_give_way_to_another(tmp_path, run):
    make_real("mini_supervisely", tmp_path / MINI)
    real = make_real("mini_supervisely", tmp_path / "real")
    with pytest.raises(DataError, match=f"{MINI}: holds a set that was not made by this command; move it away"):
        run(data=real)


@pytest.mark.parametrize(
    ("generator", "gone", "message"),
    [
        (
            "mini_supervisely",
            "val.txt",
            "does not look like mini_supervisely: no test_tipc/data/mini_supervisely/val.txt",
        ),
        ("cityscapes", "gtFine", "does not look like Cityscapes: no gtFine/train/*/*_gtFine_labelTrainIds.png"),
        (
            "imagenet_lite",
            "val",
            "does not look like ImageNet: no val/*/*; --data-path needs train/*/*, val/*/* or train_list",
        ),
    ],
)
def test_real_set_that_lacks_something_is_refused(tmp_path, run, generator, gone, message):
    real = make_real(generator, tmp_path / "real")
    (real / gone).rename(tmp_path / "away")
    with pytest.raises(DataError, match=re.escape(message)):
        run(MODEL_OF[generator], data=real)
    assert not (tmp_path / FOLDER_OF[generator]).exists()


def test_whole_training_without_the_real_set_says_what_to_pass(tmp_path, run):
    expected = (
        "whole_train_whole_infer needs the whole of mini_supervisely, in test_tipc/data/mini_supervisely there is {}; "
        "pass --data DIR with the set, or --url URL --sha256 SUM of an archive of it"
    )
    with pytest.raises(DataError, match=re.escape(expected.format("no such set"))):
        run(mode=WHOLE)
    run(mode=LITE)
    with pytest.raises(DataError, match=re.escape(expected.format("generated data"))):
        run(mode=WHOLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": Path("."), "url": "https://x/y"}, "both --data and --url: give one of them"),
        ({"sha256": "0" * 64}, "--sha256 without --url: it is the checksum of an archive that is fetched"),
        ({"data": Path("/no/such")}, "--data /no/such: no such folder"),
        ({"url": "https://x/y"}, "https://x/y: needs its checksum too; pass --sha256 SUM"),
        ({"url": "https://x/y", "sha256": "12"}, "sha256 '12': must be 64 hexadecimal digits"),
        ({"url": "http://[/x", "sha256": "0" * 64}, "url 'http://[/x': cannot be read as a URL"),
        ({"url": "ftp://x/y", "sha256": "0" * 64}, "url 'ftp://x/y': must begin with https:, http:, file:"),
    ],
)
def test_sources_that_are_none_are_refused_before_anything_is_made(tmp_path, run, options, message):
    with pytest.raises((DataError, FileError), match=re.escape(message)):
        run(**options)
    assert not (tmp_path / "test_tipc").exists()


def test_folder_that_cannot_be_written_is_named(tmp_path, run):
    (tmp_path / "test_tipc").write_text("a file where a folder belongs")
    with pytest.raises(RunError, match=r"test_tipc/data: cannot be written: .*; check space and permissions"):
        run()


# The real set, fetched


@pytest.fixture
def files() -> dict[str, bytes]:
    """The smallest mini_supervisely that passes."""
    return {name: b"Images/a.png Annotations/a.png\n" for name in ("train.txt", "val.txt", "test.txt")}


@pytest.fixture
def fetch(tmp_path: Path, run: Callable[..., PreparedFiles]) -> Callable[..., PreparedFiles]:
    """Prepare from an archive behind a file: URL."""

    def call(archive: bytes, **options) -> PreparedFiles:
        (tmp_path / "served").write_bytes(archive)
        known = {"url": (tmp_path / "served").as_uri(), "sha256": hashlib.sha256(archive).hexdigest()}
        return run(**{"mode": WHOLE, **known, **options})

    return call


def assert_nothing_was_made(tmp_path: Path) -> None:
    assert not (tmp_path / MINI).exists()
    assert hidden(tmp_path / "test_tipc/data") == []


@pytest.mark.parametrize("place", ["", "mini_supervisely/", "./download/mini_supervisely/"])
@pytest.mark.parametrize(
    "pack", [zip_of, tar_of, lambda files: tar_of(files, kind="w"), lambda f: tar_of(f, kind="w:xz")]
)
def test_archive_is_unpacked_and_its_set_found(tmp_path, fetch, files, pack, place):
    said: list[str] = []
    prepared = fetch(pack({place + name: content for name, content in files.items()}), report=said.append)
    assert len(said) == 3  # fetching, unpacking, and the notice
    assert prepared.folders == (tmp_path / MINI,)
    assert (tmp_path / MINI / "val.txt").read_bytes() == files["val.txt"]
    assert prepared.notices == (f"{MINI}: mini_supervisely of {(tmp_path / 'served').as_uri()}",)
    assert hidden(tmp_path / "test_tipc/data") == []


def test_same_archive_is_not_fetched_twice(tmp_path, fetch, files):
    archive = zip_of(files)
    fetch(archive)
    assert (
        json.loads((tmp_path / MINI / ".mezzo-source.json").read_text())["sha256"]
        == hashlib.sha256(archive).hexdigest()
    )
    (tmp_path / "served").write_bytes(b"gone")
    url, sha256 = (tmp_path / "served").as_uri(), hashlib.sha256(archive).hexdigest()
    assert fetch(b"gone", url=url, sha256=sha256.upper()).folders == ()


def test_archive_with_another_checksum_is_not_opened(tmp_path, fetch, files, monkeypatch):
    monkeypatch.setattr("mezzo.tipc._data_folder.unpack", lambda *args: pytest.fail("it was opened"))
    archive = zip_of(files)
    found = hashlib.sha256(archive).hexdigest()
    with pytest.raises(FetchError, match=f"has the SHA-256 {found}, expected is {'0' * 64}; it was not opened"):
        fetch(archive, sha256="0" * 64)
    assert_nothing_was_made(tmp_path)


def test_generated_data_stay_when_the_archive_is_refused(tmp_path, run, fetch):
    run()
    before = fingerprint(tmp_path / MINI)
    with pytest.raises(FileError):
        fetch(b"no archive")
    assert fingerprint(tmp_path / MINI) == before


@pytest.mark.parametrize(
    ("archive", "fault"),
    [
        (tar_of({"a/../../evil": b"x"}), "evil"),
        (b"no archive", "tar"),
        (tar_of({"other.txt": b"x"}), "train.txt"),
    ],
)
def test_what_is_no_archive_of_the_set_is_refused_and_nothing_stays(tmp_path, fetch, archive, fault):
    with pytest.raises((DataError, FileError), match=fault):
        fetch(archive)
    assert_nothing_was_made(tmp_path)
    assert not list(tmp_path.rglob("evil"))


def test_archive_over_the_bound_is_not_fetched_to_its_end(tmp_path, fetch):
    with pytest.raises(FetchError, match="larger than 100 bytes; fetch it yourself and pass --data DIR"):
        fetch(bytes(10_000), bounds=Bounds(archive_bytes=100))
    assert_nothing_was_made(tmp_path)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "file:///no/such/file", "file:///tmp"])
def test_url_that_leads_nowhere_is_one_line(tmp_path, fetch, url):
    with pytest.raises(MezzoError, match=re.escape(url)):
        fetch(b"", url=url)
    assert_nothing_was_made(tmp_path)


# The recipe for a machine without GPU


def test_smaller_recipe_is_written_without_gpu_in_lite_modes_alone(tmp_path, run):
    file = tmp_path / "configs/lite_cpu.yml"
    make_real("mini_supervisely", tmp_path / MINI)
    for mode, has_gpu in ((LITE, True), (WHOLE, False), (INFER, False)):
        assert run(mode=mode, has_gpu=has_gpu).files == ()
    prepared = run(mode=LITE, has_gpu=False)
    assert prepared.files == (file,)
    assert prepared.notices[-1].startswith(
        "no GPU here: configs/lite_cpu.yml builds on net.yml with crops of 128x64, so that a run takes minutes"
    )
    assert run(mode=LITE, has_gpu=False).files == (file,)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_smaller_recipe_of_somebody_else_is_not_overwritten(tmp_path, run, kind):
    file, outside = tmp_path / "configs/lite_cpu.yml", tmp_path.parent / f"{tmp_path.name}_outside"
    (tmp_path / "configs").mkdir()
    outside.write_text("precious")
    make = {"file": lambda: file.write_text("# my own\n"), "folder": file.mkdir}
    make |= {"link": lambda: file.symlink_to(outside), "pipe": lambda: os.mkfifo(file)}
    make[kind]()
    with pytest.raises(DataError, match="outside" if kind == "link" else "not made by this command"):
        run(has_gpu=False)
    assert outside.read_text() == "precious"
    assert kind != "file" or file.read_text() == "# my own\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs"]  # looked at before data are made


def test_recipe_outside_of_the_repository_gets_no_smaller_one_beside_it(tmp_path, run):
    run()
    outside = tmp_path.parent / f"{tmp_path.name}_recipes"
    outside.mkdir()
    (tmp_path / "configs/net.yml").rename(outside / "net.yml")
    text = tmp_path / "configs/text.txt"
    text.write_text(text.read_text().replace("configs/net.yml", f"../{outside.name}/net.yml"))
    with pytest.raises(DataError, match="outside"):
        prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo")
    assert [path.name for path in outside.iterdir()] == ["net.yml"]


def test_the_repository_itself_is_no_place_for_data(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "x.txt").write_text(TUTORIAL.replace("./lite_data", "."))
    with pytest.raises(DataError, match="repository itself"):
        prepare(Path("x.txt"), LITE, root=root, has_gpu=False, profile="mezzo-tutorial")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_smaller_recipe_changes_sizes_and_nothing_else(run, tmp_path):
    run(has_gpu=False)
    small, documented = (load_recipe(tmp_path / "configs" / name).resolved for name in ("lite_cpu.yml", "net.yml"))
    assert small["train_dataset"]["transforms"][0]["crop_size"] == [128, 64]
    small["train_dataset"]["transforms"][0]["crop_size"] = [1024, 512]
    assert small == documented


@pytest.mark.parametrize(
    "directory", sorted(path.name for path in (REPOSITORY / "test_tipc/configs").iterdir() if path.name != "_base_")
)
def test_smaller_recipe_of_each_network_loads(tmp_path, directory):
    """Beside a copy of the configurations: the working tree is not written to."""
    for source in (REPOSITORY / "test_tipc/configs").rglob("*"):
        if source.is_file() and source.parent.name in ("_base_", directory) and source.name != "lite_cpu.yml":
            target = tmp_path / source.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    text = Path("test_tipc/configs", directory, "train_infer_python.txt")
    prepared = prepare(text, LITE, root=tmp_path, has_gpu=False)
    if directory == "mobilenet_v3_small":
        assert prepared.files == ()
        return
    (file,) = prepared.files
    assert file.name == "lite_cpu.yml"
    sizes = [
        transform[key]
        for split in ("train_dataset", "val_dataset")
        for transform in load_recipe(file).resolved[split]["transforms"]
        for key in ("crop_size", "target_size")
        if key in transform
    ]
    assert sizes
    assert all(size == [128, 64] for size in sizes)
    assert "_base_" in yaml.safe_load(file.read_text())


def test_two_recipes_of_a_folder_have_small_variants_of_their_own(tmp_path, run):
    run("fcn_hrnetw18")
    (tmp_path / "configs/pp_net.yml").write_text((tmp_path / "configs/net.yml").read_text())
    text = text_of("x").replace(
        "norm_export:tools/export.py --config configs/net.yml", "norm_export:e.py --config configs/pp_net.yml"
    )
    (tmp_path / "configs/text.txt").write_text(text)
    prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo")
    plan = make_plan(text, LITE, PROFILES["mezzo"])
    steps = {step.name: step for step in adapt_plan(plan, root=tmp_path, gpus=0, allow=Allowances()).steps}
    assert "--config configs/lite_cpu.yml " in steps["train-1"].bare
    assert "--config configs/lite_cpu_pp_net.yml " in steps["export-1"].bare
    assert load_recipe(tmp_path / "configs/lite_cpu_pp_net.yml").resolved


def test_broken_recipe_is_named(tmp_path, run):
    run()
    (tmp_path / "configs/net.yml").unlink()
    with pytest.raises(RecipeError, match=r"net\.yml: no such file"):
        prepare(Path("configs/text.txt"), LITE, root=tmp_path, has_gpu=False, profile="mezzo")


# Weights


def test_missing_weights_are_noticed_where_nothing_is_trained(tmp_path, run):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/b.pdparams").write_bytes(b"")
    offline, missing = (line for line in run(mode=INFER).notices if "weights" in line)
    assert "MEZZO_OFFLINE" in offline
    assert "pphumanseg_lite_generic_192x192.zip" in offline
    assert missing.startswith("./weights/a.pdparams: no such weights; this mode does not train")
    assert not [line for line in run(mode=LITE).notices if "weights" in line]


def test_published_weights_are_put_where_the_text_looks(tmp_path, run):
    url = PUBLISHED["pphumanseg_lite"]
    network = create_model("pp_humanseg_lite", num_classes=2)
    save_pdparams(network, tmp_path / "model.pdparams")
    place_of(url).parent.mkdir(parents=True)
    with zipfile.ZipFile(place_of(url), "w") as archive:
        archive.write(tmp_path / "model.pdparams", "pphumanseg_lite_generic_192x192/model.pdparams")
    try:
        run(mode=INFER)
    finally:
        place_of(url).unlink()
    target = tmp_path / "weights/a.pdparams"
    assert count_classes("pp_humanseg_lite", target) == 2
    loaded = create_model("pp_humanseg_lite", num_classes=2)
    load_trained(loaded, target)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), loaded.parameters(), strict=True))


def test_weights_that_cannot_be_fetched_are_a_notice_in_lite_modes_and_an_error_in_others(tmp_path, run):
    run("fcn_hrnetw18")
    url = "https://bj.bcebos.com/paddleseg/dygraph/PP_STDCNet1.tar.gz"
    recipe = (tmp_path / "configs/net.yml").read_text()
    (tmp_path / "configs/net.yml").write_text(recipe.replace("{type: STDC1}", f"{{type: STDC1, pretrained: '{url}'}}"))

    def again(mode: str) -> PreparedFiles:
        return prepare(Path("configs/text.txt"), mode, root=tmp_path, has_gpu=True, profile="mezzo")

    (notice,) = (line for line in again(LITE).notices if url in line)
    assert str(place_of(url)) in notice
    assert "lite modes start without" in notice
    (tmp_path / FOLDER_OF["cityscapes"] / GENERATED).unlink()  # as if it were the real set
    with pytest.raises(RunError, match=re.escape(str(place_of(url)))):
        again(WHOLE)
