"""`mezzo tipc`: the commands, their exit codes, and every line they complain with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tipc_plans import CONFIG, MODE, RECIPE, write_repository

from mezzo.cli import run
from mezzo.tipc import PROFILES, make_plan, run_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a configuration whose commands are small scripts of its own."""
    monkeypatch.chdir(tmp_path)
    write_repository(tmp_path)
    return tmp_path


def test_a_plan_as_text_json_and_shell(here, capsys):
    assert run(["tipc", "plan", "c.txt", MODE, "--profile", "seg"]) == 0
    text = capsys.readouterr().out
    assert "net, mode lite_train_lite_infer, profile seg (as asked for): 4 steps" in text
    assert "skipped: no GPU" in text or "infer-2" in text
    assert run(["tipc", "plan", "c.txt", MODE, "--compat", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [step["kind"] for step in plan["steps"]] == ["train", "export", "infer", "infer"]
    assert run(["tipc", "plan", "c.txt", MODE, "--compat", "--format", "shell"]) == 0
    script = capsys.readouterr().out
    checked = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_a_run_ends_with_its_status_and_a_page(here, capsys):
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg"]) == 0
    out = capsys.readouterr().out
    assert "Run successfully with command - net - " in out
    page = here / f"test_tipc/output/net/{MODE}/c/report.html"
    assert f"report: {page}" in out
    assert page.with_suffix(".xml").is_file()
    (here / "tools/export.py").write_text("raise SystemExit(4)")
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg", "--json"]) == 1
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert {record["step"]: record["status"] for record in records}["export-1"] == "failed"
    assert [record["reason"] for record in records if record["step"] == "infer-1"] == ["export-1 failed"]


def test_what_the_lint_finds_is_said_and_refused_if_asked_for(here, capsys):
    (here / "c.txt").write_text((here / "c.txt").read_text().replace("gpu_list:-1", "gpu_list:-1|0,1,2,3,4,5,6,7,8"))
    run(["tipc", "run", "c.txt", MODE, "--profile", "seg"])
    finding = "error: line 4: '0,1,2,3,4,5,6,7,8' is taken for hosts because of its length"
    assert finding in capsys.readouterr().out
    info = json.loads((here / f"test_tipc/output/net/{MODE}/c/run.json").read_text())
    assert info["notices"] == [finding]
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg", "--strict"]) == 2
    assert f"c.txt: {finding} (--strict; 'mezzo tipc lint' lists all)" in capsys.readouterr().err


def test_a_dry_run_runs_nothing(here, capsys):
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg", "--dry-run"]) == 0
    assert "train-1" in capsys.readouterr().out
    assert not (here / "test_tipc").exists()
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg", "--compat", "--dry-run"]) == 0
    assert "tools/train.py" in capsys.readouterr().out


def test_nothing_to_do_is_three(here, capsys):
    (here / "c.txt").write_text(CONFIG.replace("trainer:amp_train", "trainer:"))
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg"]) == 3
    assert "nothing is planned in mode lite_train_lite_infer; 'mezzo tipc lint' says why" in capsys.readouterr().err
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg", "--compat"]) == 3


def test_a_script_that_ends_by_itself_is_one(here, capsys):
    (here / "c.txt").write_text("\n".join(["=="] + ["k:null"] * 55))
    assert run(["tipc", "run", "c.txt", "whole_infer", "--profile", "rs"]) == 1
    assert "no inference model is named in the configuration" in capsys.readouterr().err
    assert run(["tipc", "run", "c.txt", "whole_infer", "--profile", "rs", "--compat"]) == 1
    assert "no inference model is named in the configuration" in capsys.readouterr().out
    status = (here / "test_tipc/output/null/whole_infer/results_python.log").read_text()  # the script begins it first
    assert status == f"{'-' * 24} whole_infer {'-' * 24}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "none.txt", MODE], "none.txt"),
        (["run", "c.txt", "lite"], "unknown mode 'lite'"),
        (["run", "c.txt", MODE, "--jobs", "0"], "--jobs 0"),
        (["run", "c.txt", MODE, "--step-limit", "0"], "--step-limit 0"),
        (["run", "c.txt", MODE, "--step-limit", "nan"], "--step-limit nan: must be"),
        (["run", "c.txt", MODE, "--total-limit", "inf"], "--total-limit inf: must be"),
        (["matrix", "c.txt", "--on", "slurm", "--step-limit", "inf"], "--step-limit inf: must be"),
        (["run", "c.txt", MODE, "--total-limit", "-1"], "--total-limit -1"),
        (["plan", "c.txt", MODE, "--format", "xml"], "unknown --format 'xml'"),
        (["lint", "c.txt", MODE, "--profile", "x"], "unknown profile 'x'"),
        (["run", "c.txt", MODE, "--compat", "--resume"], "--compat and --resume"),
        (["run", "c.txt", MODE, "--compat", "--jobs", "2"], "--compat and --jobs"),
        (["report", "nowhere"], "nowhere"),
        (["matrix", "c.txt", "--slurm", "--ray"], "--on, --slurm and --ray: give one of them"),
        (["matrix", "c.txt", "--on", "pbs"], "--on pbs: must be one of ray, ray://ADDRESS, slurm, k8s"),
        (["matrix", "c.txt", "--on", "ray://"], "--on ray://: must be one of"),
        (["matrix", "c.txt", "--on", "k8s"], "add --dry-run to print a Job"),
        (["matrix", "c.txt", "--on", "slurm", "--step-memory", "4"], "must be a size such as 512M or 4G"),
        (["matrix", "c.txt", "--on", "slurm", "--step-memory", "9" * 5000 + "G"], "must be a size such as 512M"),
        (["matrix", "c.txt", "--step-memory", "4G"], "--step-memory 4G: needs --on"),
        (["matrix", "c.txt", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["prepare", "c.txt", MODE], "net"),
    ],
)
def test_bad_input_is_two_and_one_line(words, message, here, capsys):
    assert run(["tipc", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_script_that_is_not_there_is_said_before_anything_runs(here, capsys):
    (here / "tools/export.py").unlink()
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg"]) == 2
    assert "tools/export.py: no such script, export-1 calls it" in capsys.readouterr().err
    assert not (here / "test_tipc").exists()
    assert run(["tipc", "plan", "c.txt", MODE, "--profile", "seg"]) == 0
    assert "  tools/export.py: no such script, export-1 calls it" in capsys.readouterr().out
    assert run(["tipc", "lint", "c.txt", MODE]) == 1


URL = "https://h.example/w.tar.gz"


@pytest.fixture
def with_address(here):
    """The same with a recipe that names weights behind an address, and two classes of scripts that show their words."""
    (here / "configs/net/net.yml").write_text(RECIPE.replace("https://h/w.tar.gz", URL))
    return here


def test_lite_modes_go_on_without_weights_that_cannot_be_fetched_and_say_so(with_address, capsys):
    assert run(["tipc", "plan", "c.txt", MODE, "--profile", "mezzo"]) == 0
    assert "--opts model.backbone.pretrained=null" in capsys.readouterr().out
    assert run(["tipc", "plan", "c.txt", MODE, "--profile", "mezzo", "--format", "shell"]) == 0
    assert f"# train-1: starts without {URL}" in capsys.readouterr().out
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "mezzo"]) == 0
    notice = f"starts without {URL}: MEZZO_OFFLINE is set"
    assert notice in capsys.readouterr().out
    (records,) = with_address.glob("test_tipc/output/**/steps.jsonl")
    record = next(each for each in map(json.loads, records.read_text().splitlines()) if each["step"] == "train-1")
    assert record["argv"][-2:] == ["--opts", "model.backbone.pretrained=null"]
    assert notice in (with_address / record["log"]).read_text()  # also in the log of the training
    assert notice in (records.parent / "report.html").read_text().replace("&#x27;", "'")


def test_other_modes_say_where_to_put_the_file(with_address, capsys):
    (with_address / "c.txt").write_text(CONFIG.replace("python3.7", "python").replace("gpu_list:0|0,1", "gpu_list:-1"))
    assert run(["tipc", "run", "c.txt", "whole_train_whole_infer", "--profile", "mezzo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "put it at" in line
    assert not (with_address / "test_tipc").exists()
    trained = "--amp_level O1 --opts model.backbone.pretrained=null"
    (with_address / "c.txt").write_text((with_address / "c.txt").read_text().replace("--amp_level O1", trained))
    assert run(["tipc", "run", "c.txt", "whole_train_whole_infer", "--profile", "mezzo", "--dry-run"]) == 0


def test_plan_lint_and_strict_runs_find_what_is_not_there(with_address, capsys):
    (with_address / "configs/net/net.yml").unlink()
    for command in (["plan"], ["lint"], ["run", "--dry-run", "--strict"]):
        code = run(["tipc", *command, "c.txt", MODE, "--profile", "mezzo"])
        assert code == {"plan": 0, "lint": 1, "run": 2}[command[0]]
        found = capsys.readouterr()
        assert "configs/net/net.yml: no such file" in found.out + found.err


def test_escapes_of_a_text_do_not_reach_the_terminal(with_address, capsys):
    recipe = (with_address / "configs/net/net.yml").read_text()
    (with_address / "configs/net/net.yml").write_text(recipe.replace(f"'{URL}'", '"https://h/\\e]0;x\\a.tar.gz"'))
    for command in ("lint", "plan", "prepare"):
        run(["tipc", command, "c.txt", MODE, "--profile", "mezzo"])
        found = capsys.readouterr()
        assert "\x1b" not in found.out + found.err


def test_a_failed_step_shows_its_command_and_why(here, capsys):
    (here / "tools/train.py").write_text("import sys; print('epoch 1'); sys.exit('mezzo: the disk is full')")
    assert run(["tipc", "run", "c.txt", MODE, "--profile", "seg"]) == 1
    out = capsys.readouterr().out
    assert "(exit status 1: mezzo: the disk is full)" in out
    assert "          | epoch 1" in out
    assert "          $ " in out


def test_lint_says_what_is_odd(here, capsys):
    assert run(["tipc", "lint", "c.txt", MODE]) == 0
    assert "profile seg, by the text's form (seg-52)" in capsys.readouterr().out
    (here / "c.txt").write_text(CONFIG.replace("python3.7", "python3.7 "))
    assert run(["tipc", "lint", "c.txt", MODE]) == 1
    assert "error: line 3: blanks around the value" in capsys.readouterr().out


def test_many_configurations_one_page(here, capsys):
    (here / "bad.txt").write_text("nothing\n")
    assert run(["tipc", "matrix", "bad.txt", "c.txt", "--out", "page"]) == 2
    out = capsys.readouterr().out
    assert "[1/2] bad.txt" in out
    assert "cannot tell which profile" in out
    assert f"report: {here}/page/report.html" in out
    assert (here / "page/report.html").is_file()
    (here / "tools/train.py").write_text("raise SystemExit(4)")
    assert run(["tipc", "matrix", "c.txt", "--out", "page"]) == 1
    assert run(["tipc", "report", "test_tipc/output", "--out", "all.html"]) == 0
    assert (here / "all.xml").is_file()


def test_configurations_of_all_models_and_modes_have_folders_of_their_own():
    for profile in ("mezzo", "template", "ocr-2022"):
        plans = [
            make_plan(CONFIG.replace("model_name:net", f"model_name:{model}"), mode, PROFILES[profile])
            for model in ("a", "b")
            for mode in (MODE, "whole_infer")
        ]
        folders = [run_folder(plan, Path(name)) for plan in plans for name in ("x/one.txt", "y/two.txt")]
        assert len(set(folders)) == 8
    assert run_folder(make_plan(CONFIG, MODE, PROFILES["mezzo"]), Path("c.txt")) == f"./test_tipc/output/net/{MODE}/c"


def test_a_cluster_that_is_not_here_is_one_line(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["tipc", "matrix", "c.txt", "--on", "slurm"]) == 1
    assert "there is no command 'sinfo' here: --on slurm needs a machine that submits jobs" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--on", "ray"], ["--on", "ray://host:6379"], ["--ray"]])
def test_ray_is_asked_for_where_it_is_missing(here, capsys, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["tipc", "matrix", "c.txt", *words]) == 2
    assert "this command needs ray: pip install 'mezzo[ray]'" in capsys.readouterr().err


def test_old_names_of_clusters_name_the_new_ones(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["tipc", "matrix", "c.txt", "--slurm"]) == 1
    assert "--slurm is deprecated and will be removed in 0.4; use --on slurm --dry-run" in capsys.readouterr().err


def test_the_scripts_of_the_documents_are_calls_of_it(tmp_path):
    for script, word in (("prepare.sh", "prepare"), ("test_train_inference_python.sh", "run")):
        stub = tmp_path / "python"
        stub.write_text('#!/bin/bash\necho "$@"\n')
        stub.chmod(0o755)
        command = ["bash", f"test_tipc/{script}", "a.txt", MODE, "--jobs", "2"]
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={"MEZZO_PYTHON": str(stub), "PATH": "/usr/bin:/bin"}
        )
        assert result.stdout == f"-m mezzo tipc {word} a.txt {MODE} --jobs 2\n"


def test_python_m_mezzo_is_the_command():
    result = subprocess.run([sys.executable, "-m", "mezzo", "tipc", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "matrix" in result.stdout
