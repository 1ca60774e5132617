"""Findings about configuration texts: each has a text that it is about."""

import pytest
from tipc_plans import CONFIG, MODE, RECIPE

from mezzo.tipc import PROFILES, lint, make_plan


def findings(text, profile="seg", mode=MODE):
    return [str(each) for each in lint(text, mode, PROFILES[profile], make_plan(text, mode, PROFILES[profile]))]


def test_a_good_text_has_none_but_what_the_matrix_leaves_out():
    assert all("left out" in line for line in findings(CONFIG))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("\n", "\r\n", "warning: CR at the ends of lines"),
        ("===train_params===", "\ufeff===train_params===", "warning: line 1: the text begins with a byte order mark"),
        ("python:python3.7", "\npython:python3.7", "warning: line 3: an empty line does not count"),
        ("null:null\n##\ntrainer", "# a comment\ntrainer", "warning: line 13: there are no comments"),
        ("python:python3.7", "python:python3.7 ", "error: line 3: blanks around the value 'python3.7 '"),
        (
            "--model_path:null",
            "--model_path:https://x.y",
            "warning: line 10: only the part before the second colon is read: 'https'",
        ),
        ("eval:null", "eval", "warning: line 24: no colon: the whole line 'eval' is a key without value"),
        ("--iters:lite_train_lite_infer=5", "--iters:5", "warning: line 7: no epochs or iterations for mode"),
        ("--batch_size:lite_train_lite_infer=2", "--batch_size:x=2", "warning: line 9: no batch size for mode"),
        (
            "gpu_list:0|0,1",
            "gpu_list:0,1,2,3,4,5,6,7,8",
            "error: line 4: '0,1,2,3,4,5,6,7,8' is taken for hosts because of its length",
        ),
        (
            "gpu_list:0|0,1",
            "gpu_list:1.1.1.1,2.2.2.2;0,1",
            "warning: line 4: the addresses of '1.1.1.1,2.2.2.2;0,1' are too short",
        ),
        (
            "--save_log_path:null",
            "--save_log_path:x",
            "warning: line 49: the script passes --save_log_path to no command",
        ),
        ("tools/train.py", "tools/train.py; rm", "error: the command of train-1 has an unquoted ';'"),
        ("trainer:amp_train", "trainer:", "error: nothing is planned in mode"),
    ],
)
def test_what_is_found(old, new, expected):
    assert old in CONFIG
    lines = findings(CONFIG.replace(old, new) if old == "\n" else CONFIG.replace(old, new, 1))
    assert any(line.startswith(expected) for line in lines), lines


def test_forms_that_do_not_fit():
    assert any(
        "does not have the form of profile 'ocr' (standard-51): it looks like seg-52" in line
        for line in findings(CONFIG, "ocr")
    )
    cut = "\n".join(CONFIG.split("\n")[:40])
    assert any(line.startswith("warning: 40 lines that count, the form has 52") for line in findings(cut))
    late = CONFIG.replace("model_name", "\n\n\nmodel_name", 1)
    assert any("only the first 51 lines of the file are read" in line for line in findings(late, "seg-2022-04"))
    assert any("unknown mode 'x'" in line for line in findings(CONFIG, mode="x"))


def test_what_repositories_ignore():
    assert any("ignores the epochs" in line for line in findings(CONFIG, "clas"))
    text = "\n".join(
        ["=="] + [f"k{i}:v" for i in range(11)] + ["trainer:n", "n:t.py", "##", "==", "e:n", "##", "=="] + ["k:v"] * 14
    )
    lines = findings(text, "tutorial")
    assert any("passes k9 to no command" in line for line in lines)
    assert any("passes k3 to no command" in line for line in lines)
    assert any("the image is passed in whole_infer only" in line for line in lines)


def test_failures_of_the_script_itself():
    text = CONFIG.replace("infer_export:null", "infer_export:strange")
    assert any("unknown inference mode 'strange' in line 38" in line for line in findings(text, "det", "whole_infer"))
    assert any(
        "no inference model is named" in line
        for line in findings("\n".join(["=="] + ["k:null"] * 55), "rs", "whole_infer")
    )


def missing(root, text=CONFIG, gpus=0, mode=MODE):
    plan = make_plan(text, mode, PROFILES["mezzo"])
    found = lint(text, mode, PROFILES["mezzo"], plan, root, gpus)
    return {str(each) for each in found} - {str(each) for each in lint(text, mode, PROFILES["mezzo"], plan)}


@pytest.fixture
def repository(tmp_path):
    """A root that lacks nothing."""
    for name in ("tools/train.py", "tools/export.py", "deploy/python/infer.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "configs/net").mkdir(parents=True)
    (tmp_path / "configs/net/net.yml").write_text(RECIPE.replace(", pretrained: 'https://h/w.tar.gz'", ""))
    for name in ("leftImg8bit/train/a/x_leftImg8bit.png", "leftImg8bit/val/a/x_leftImg8bit.png"):
        label = name.replace("leftImg8bit/", "gtFine/").replace("_leftImg8bit", "_gtFine_labelTrainIds")
        for path in (tmp_path / "d" / name, tmp_path / "d" / label):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    (tmp_path / "img").write_text("")
    return tmp_path


def test_a_root_that_lacks_nothing_has_no_finding(repository):
    assert missing(repository, gpus=2) == set()


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("tools/export.py", "error: tools/export.py: no such script, export-1 calls it"),
        ("configs/net/net.yml", "error: configs/net/net.yml: no such file, train-1 reads it"),
        ("img", "warning: img: no such image"),
        ("d/gtFine/val/a/x_gtFine_labelTrainIds.png", "`mezzo tipc prepare` makes it"),
    ],
)
def test_what_is_not_there_is_found_before_anything_runs(repository, gone, expected):
    (repository / gone).unlink()
    assert any(expected in line for line in missing(repository, gpus=2))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("--amp_level O1", "--amp_level O1 --device gpu", "warning: train-1 asks for a GPU (--device gpu)"),
        ("net.yml --precision", "net.yml --precision", "warning: infer-2 asks for a GPU (--device=gpu)"),
    ],
)
def test_what_the_machine_lacks_is_found(repository, old, new, expected):
    assert any(line.startswith(expected) for line in missing(repository, CONFIG.replace(old, new)))


def test_tensorrt_is_refused_where_it_would_run(repository):
    text = CONFIG.replace("--use_trt:False", "--use_trt:True")
    assert any(line.startswith("error: infer-2 asks for TensorRT") for line in missing(repository, text, gpus=2))
    assert not any("TensorRT" in line for line in missing(repository, text))  # skipped without a GPU


@pytest.mark.parametrize("url", ["https://me:secret@h/w.tar.gz", "https://h/folder/", "file:///no/such/file"])
def test_an_address_that_cannot_be_used_is_an_error(repository, url):
    (repository / "configs/net/net.yml").write_text(RECIPE.replace("https://h/w.tar.gz", url))
    found = [line for line in missing(repository, gpus=2) if line.startswith("error")]
    assert (
        found if not url.startswith("file") else any("file:///no/such" in line for line in missing(repository, gpus=2))
    )
    assert not any("secret" in line for line in found)


def test_weights_behind_an_address_and_faults_of_a_recipe_are_found(repository):
    (repository / "configs/net/net.yml").write_text(RECIPE)
    assert any("weights https://h/w.tar.gz: not in the cache" in line for line in missing(repository, gpus=2))
    (repository / "configs/net/net.yml").write_text(RECIPE.replace("iters", "itres"))
    assert any(line.startswith("error") and "itres" in line for line in missing(repository, gpus=2))


def test_weights_that_nothing_trains_are_found(repository):
    text = CONFIG.replace("infer_model:null", "infer_model:w/model.pdparams").replace(
        "infer_export:null", "infer_export:tools/export.py --config configs/net/net.yml"
    )
    assert any("w/model.pdparams: no such weights" in line for line in missing(repository, text, 2, "whole_infer"))
