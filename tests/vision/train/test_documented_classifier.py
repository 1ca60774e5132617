"""The MobileNetV3 document's commands with what they leave open: no data path, fewer images than a batch, no class count."""

import re
import shutil

import pytest
from small_runs import train, train_in_process

from mezzo.cli import run
from mezzo.vision.lite import prepare

SMALL = ("--image-size", "32", "--resize-size", "36")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with 16 images of 16 classes where the tutorial puts them, and a training on them."""
    folder = tmp_path_factory.mktemp("tutorial")
    prepare("imagenet_lite", folder / "lite_data", count=(1, 1), size=(40, 40))
    done = train_in_process(
        *("--lr=0.1", "--batch-size=256", "--amp_level=O1", "--epochs", "1", *SMALL, "--save_dir", "out"), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    (folder / "lines.txt").write_text(done.stdout)
    return folder


@pytest.fixture
def here(run_folder, tmp_path, monkeypatch):
    """A copy of that folder, as the current one."""
    shutil.copytree(run_folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def test_a_set_below_one_batch_trains_on_all_of_it_and_says_so(run_folder):
    trained = (run_folder / "lines.txt").read_text()
    assert "no --data-path: the images of ./lite_data are used" in trained
    assert "the training set has 16 samples, less than one batch of 256" in trained
    assert re.search(r"\[Epoch 1, iter: 0\] top1: [\d.]+, top5: .* avg_samples: 16\.0, avg_ips", trained)


def test_weights_decide_the_classes_of_an_evaluation(here, capsys):
    assert train("--test-only", "--pretrained=out/latest.pdparams", *SMALL) == 0
    assert "entries loaded" in capsys.readouterr().out
    assert train("--test-only", "--pretrained=out/latest.pdparams", "--num-classes", "1000", *SMALL) == 2
    assert "(1024, 16), (1024, 1000)" in capsys.readouterr().err


def test_weights_for_fewer_classes_than_the_data_has_are_refused(here, capsys):
    (here / "lite_data/train/zebra").mkdir()
    assert train("--test-only", "--pretrained=out/latest.pdparams", *SMALL) == 2
    assert "out/latest.pdparams has 16 classes, the data have 17" in capsys.readouterr().err


def test_weights_for_more_classes_than_the_data_has_need_the_number(here, capsys):
    for split in ("train", "val"):
        shutil.rmtree(sorted((here / "lite_data" / split).iterdir())[-1])
    assert train("--test-only", "--pretrained=out/latest.pdparams", *SMALL) == 2
    assert "has 16 classes, the data have 15; if the data are a part" in capsys.readouterr().err
    assert train("--test-only", "--pretrained=out/latest.pdparams", "--num-classes", "16", *SMALL) == 0


def test_the_first_folder_with_training_images_is_taken(here, capsys):
    (here / "data").mkdir()  # no images in it
    (here / "lite_data").rename(here / "ILSVRC2012")
    assert train("--test-only", "--pretrained=out/latest.pdparams", *SMALL) == 0
    assert "the images of ./ILSVRC2012 are used" in capsys.readouterr().out


def test_no_data_anywhere_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("--epochs", "1") == 2
    assert "./data, ./lite_data, ./ILSVRC2012 hold no training images either" in capsys.readouterr().err


@pytest.mark.slow  # an export takes ten seconds
def test_sixteen_classes_stay_sixteen_along_the_whole_chain(here, capsys):
    weights = "--pretrained=out/latest.pdparams"
    export = ["export", "--model=mobilenet_v3_small", weights, "--save-inference-dir=deployed", "--no-onnx"]
    assert run([*export, "--num-classes", "1000"]) == 2
    assert "(1024, 16), (1024, 1000)" in capsys.readouterr().err
    assert not list(here.glob("deployed/*.pt2"))
    assert run(export) == 0
    assert "16 classes" in capsys.readouterr().out
    assert "num_classes: 16" in (here / "deployed/deploy.yaml").read_text()
    assert (
        run(["infer", "--use-gpu=False", "--model-dir=deployed", "--batch-size=1", "--top-k", "16", "--engine=torch"])
        == 0
    )
    out = capsys.readouterr().out
    assert "no --img-path: ./lite_data/test/demo.jpg is used" in out
    found = {int(number) for number in re.findall(r"class_id: (\d+)", out)}
    assert found <= set(range(16)), out
    assert found
