"""What is adapted before a plan is run, and what is refused."""

import os
import sys

import pytest
from tipc_plans import CONFIG, EXAMPLES, MODE, RECIPE, plan_of, step

from mezzo.tipc import PROFILES, Allowances, ConfigError, adapt_plan, make_plan, plan_script


def always(word, ours):
    return True


def adapted(profile="mezzo", gpus=0, text=CONFIG, mode=MODE, gpu_id="", allow=None, works=always, **options):
    plan = make_plan(text, mode, PROFILES[profile], "/root", gpu_id)
    return adapt_plan(plan, gpus=gpus, allow=allow or Allowances(), works=works, **options)


def by_name(plan):
    return {step.name: step for step in plan.steps}


def test_a_machine_without_gpu_trains_on_the_cpu_and_skips_gpu_inference(tmp_path):
    steps = by_name(adapted(root=tmp_path))
    assert steps["train-1"].notices == ("needs one GPU (0), this machine has no GPU: trained on the CPU",)
    assert steps["train-2"].notices == ("needs two GPUs (0,1), this machine has no GPU: trained as 2 CPU processes",)
    assert "--nproc_per_node=2 tools/train.py" in steps["train-2"].bare
    assert steps["train-2"].env == {"CUDA_VISIBLE_DEVICES": ""}
    assert steps["infer-2"].skip == "no GPU"
    assert steps["infer-1"].skip == ""


def test_strict_devices_skip_instead(tmp_path):
    steps = by_name(adapted(root=tmp_path, allow=Allowances(strict_devices=True)))
    assert steps["train-1"].skip == "needs one GPU (0), this machine has no GPU"
    steps = by_name(adapted(root=tmp_path, gpus=1))
    assert steps["train-1"].skip == ""
    assert steps["train-2"].skip == "needs two GPUs (0,1), this machine has one GPU"


def test_each_command_gets_its_own_cards(tmp_path):
    steps = by_name(adapted(root=tmp_path, gpus=2))
    assert [steps[name].env.get("CUDA_VISIBLE_DEVICES") for name in ("train-1", "export-1", "train-2", "infer-3")] == [
        "0",
        "0",
        "0,1",
        "0",
    ]
    assert not any(step.skip for step in steps.values())


def test_launchers_of_others_cannot_start_cpu_processes(tmp_path):
    steps = by_name(adapted("seg", root=tmp_path))
    assert steps["train-2"].skip.startswith("needs two GPUs (0,1), this machine has no GPU, and this launcher")


def test_several_hosts_are_left_to_a_scheduler(tmp_path):
    text = CONFIG.replace("gpu_list:0|0,1", "gpu_list:192.168.0.1,192.168.0.2;0,1")
    step = adapted(root=tmp_path, gpus=2, text=text).steps[0]
    assert step.skip == "several hosts: start it there through your scheduler"
    assert "--nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=192.168.0.1:29400" in step.bare


def test_an_interpreter_that_is_not_there_is_replaced(tmp_path):
    steps = by_name(adapted(root=tmp_path, works=lambda word, ours: False))
    assert steps["export-1"].bare.startswith(f"{sys.executable} tools/export.py")
    assert f"{sys.executable} tools/export.py" in steps["export-1"].status
    assert steps["export-1"].notices[0].startswith("python3.7 is not installed with mezzo: run by ")
    text = CONFIG.replace("python3.7", "python3.99")
    assert "python3.99" not in adapted("seg", root=tmp_path, text=text, works=None).steps[0].bare


def test_an_interpreter_that_starts_is_used(tmp_path, monkeypatch):
    (tmp_path / "python3.7").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert adapted("seg", root=tmp_path, works=None).steps[0].bare.startswith("python3.7 ")


def test_small_crops_where_prepare_has_put_them(tmp_path):
    (tmp_path / "configs/net").mkdir(parents=True)
    assert "net.yml" in adapted(root=tmp_path).steps[0].bare
    (tmp_path / "configs/net/lite_cpu.yml").write_text("_base_: other.yml")  # of another recipe in the folder
    assert "net/net.yml" in adapted(root=tmp_path).steps[0].bare
    (tmp_path / "configs/net/lite_cpu.yml").write_text("_base_: net.yml")
    step = adapted(root=tmp_path).steps[0]
    assert "--config configs/net/lite_cpu.yml --precision" in step.bare
    assert step.notices[-1] == "no GPU: lite_cpu.yml (crops of 128x64) in place of net.yml"
    assert "net/net.yml" in adapted(root=tmp_path, gpus=1).steps[0].bare
    assert "net/net.yml" in adapted(root=tmp_path, mode="whole_train_whole_infer").steps[0].bare


def test_every_step_has_a_log_of_its_own(tmp_path):
    head = "== model_name:m python:python gpu_list:0|1 x:y --epochs:1 --out: --b:1 --p:null latest d:d ##".split()
    rest = (
        "trainer:norm_train norm_train:train.py ## == eval:null ## == --s:./x --p: norm_export:e.py ## m:null e:null ##"
    )
    text = "\n".join([*head, *rest.split(), *"inference:i.py --g:False --b:1 --m: --i:x --bench:True".split()])
    plan = adapted("tutorial", gpus=2, root=tmp_path, text=text)
    logs = [step.log for step in plan.steps]
    assert len(set(logs)) == len(logs) == 6
    assert plan.steps[2].log in plan.steps[2].text


def test_commands_of_the_scripts_themselves_are_left_out_and_named(tmp_path):
    plan = adapted("3d", gpus=1, root=tmp_path)
    assert all(step.kind != "shell" for step in plan.steps)
    assert any("rm -rf" in line for line in plan.left_out)


def test_unknown_modes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'lite'.*lite_train_lite_infer"):
        adapted(root=tmp_path, mode="lite")
    assert adapted(root=tmp_path, mode="lite", allow=Allowances(unknown_mode=True)).steps


def test_texts_that_would_run_more_are_refused(tmp_path):
    text = CONFIG.replace("tools/train.py --config", "tools/train.py; rm -rf x --config")
    with pytest.raises(ConfigError, match=r"train-1 .*';'"):
        adapted(root=tmp_path, text=text)
    assert adapted(root=tmp_path, text=text, allow=Allowances(shell=True)).steps


def test_a_bar_is_a_blank_and_never_a_pipe(tmp_path):
    text = CONFIG.replace("tools/train.py --config", "tools/train.py | touch x --config")
    step = adapted(root=tmp_path, text=text).steps[0]
    assert "tools/train.py   touch x --config" in step.bare
    assert "|" not in step.bare + step.text + step.status


def test_the_card_of_the_command_line_is_kept(tmp_path):
    text = CONFIG.replace("infer_model:null", "infer_model:m")
    plan = adapted(root=tmp_path, text=text, mode="whole_infer", gpus=4, gpu_id="3")
    assert {step.env["CUDA_VISIBLE_DEVICES"] for step in plan.steps} == {"3"}


def test_cards_are_counted_among_those_a_scheduler_has_given(tmp_path):
    steps = by_name(adapted(root=tmp_path, gpus=2, visible="5,GPU-ab"))
    assert [steps[name].env["CUDA_VISIBLE_DEVICES"] for name in ("train-1", "train-2", "infer-3")] == [
        "5",
        "5,GPU-ab",
        "5",
    ]


def test_logs_lie_in_the_run_s_own_folder_and_have_their_documented_names(tmp_path):
    plan = adapted(root=tmp_path, gpus=2, folder="./runs/c")
    assert all(step.log.startswith("./runs/c/") for step in plan.steps)
    step = by_name(plan)["infer-1"]
    name = "python_infer_cpu_gpu_0_usemkldnn_True_threads_6_precision_fp32_batchsize_1.log"
    assert step.known_as[0] == f"./test_tipc/output/net/{MODE}/{name}"
    assert f"> ./runs/c/{name} 2>&1" in step.text
    assert step.status.endswith(f" - ./runs/c/{name}  ")


def test_logs_of_commands_that_run_in_another_folder_are_seen_from_there(tmp_path):
    passl = next(each for each in EXAMPLES if each["profile"] == "passl")
    plan = adapted("passl", root=tmp_path, gpus=1, text=passl["config"], folder="./runs/c")
    step = next(step for step in plan.steps if step.kind == "infer")
    assert step.enter == ("deploy",)
    assert step.known_as[0].startswith("log/lvvit_tiny/")
    assert f"> ../{step.log.removeprefix('./')} 2>&1" in step.text


def test_interpreters_in_folders_with_blanks_are_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my dir/python")
    step = adapted(root=tmp_path, works=lambda word, ours: False).steps[0]
    assert step.bare.startswith("'/my dir/python' tools/train.py")


def test_an_adapted_plan_as_shell_starts_every_step_from_the_root(tmp_path):
    clas = next(each for each in EXAMPLES if each["profile"] == "clas" and each["mode"] == MODE)
    script = plan_script(adapted("clas", root=tmp_path, gpus=1, text=clas["config"]))
    lines = [line for line in script.splitlines() if line.startswith("(")]
    assert any(line.startswith("( export CUDA_VISIBLE_DEVICES=0; cd deploy; ") for line in lines)
    assert all(line.endswith(" )") for line in lines)


def test_changes_of_folder_become_one(tmp_path):
    plan = plan_of(step("train-1", "a"), step("infer-1", "b", enter=("deploy",)), step("train-2", "c", enter=("..",)))
    done = adapt_plan(plan, root=tmp_path, gpus=0, allow=Allowances(), works=lambda word, ours: True)
    assert [step.enter for step in done.steps] == [(), ("deploy",), ()]


def test_a_machine_without_gpu_is_not_asked_for_one(tmp_path):
    for given in ("--device gpu", "--device=gpu", "--device cuda"):
        expected = given.replace("gpu", "cpu").replace("cuda", "cpu")
        text = CONFIG.replace("--precision fp16 --amp_level O1", f"{given} --do_eval")
        step = adapted(root=tmp_path, text=text).steps[0]
        assert f" {expected} " in step.bare
        assert step.notices[-1] == f"no GPU: {expected} in place of {given}"
        assert f" {given} " in adapted(root=tmp_path, text=text, gpus=1).steps[0].bare


def test_weights_that_cannot_be_had_are_left_out_of_lite_trainings_and_said(tmp_path):
    (tmp_path / "configs/net").mkdir(parents=True)
    (tmp_path / "configs/net/net.yml").write_text(RECIPE)
    missing = {"https://h/w.tar.gz": "no network"}
    plan = adapted(root=tmp_path, missing_weights=missing)
    for each in plan.steps:
        assert each.bare.endswith(" --opts model.backbone.pretrained=null") == (each.kind == "train")
        assert (each.status is not None and "pretrained=null" in each.status) == (each.kind == "train")
    notice = by_name(plan)["train-1"].notices[-1]
    assert notice.startswith("starts without https://h/w.tar.gz: no network; to use it, put the file at ")
    assert notice.endswith("weights/h/w.tar.gz")
    assert "pretrained" not in adapted(root=tmp_path, missing_weights={}).steps[0].bare
    whole = adapted(root=tmp_path, missing_weights=missing, mode="whole_train_whole_infer")
    assert "pretrained" not in whole.steps[0].bare


@pytest.mark.parametrize("given", ["--opts model.backbone.pretrained=mine.pdparams", "--pretrained mine.pdparams"])
def test_weights_that_the_command_names_itself_stay(tmp_path, given):
    (tmp_path / "configs/net").mkdir(parents=True)
    (tmp_path / "configs/net/net.yml").write_text(RECIPE)
    text = CONFIG.replace("--amp_level O1", f"--amp_level O1 {given}")
    step = adapted(root=tmp_path, text=text, missing_weights={"https://h/w.tar.gz": "no network"}).steps[0]
    assert step.bare.count("mine.pdparams") == 1
    assert "null" not in step.bare.replace("autocast_null", "")


def test_logs_of_inference_have_the_names_that_the_documents_give(tmp_path):
    known = by_name(adapted(root=tmp_path, folder="runs"))["infer-1"].known_as
    name = "python_infer_cpu_usemkldnn_True_threads_6_precision_fp32_batchsize_1.log"
    assert known[1:] == (f"./test_tipc/output/net/{MODE}/{name}", f"./test_tipc/output/net/{name}")
