"""Checks of a certificate: what is added to a plan, and how each is judged."""

import json
from dataclasses import replace

import pytest
from tipc_plans import CONFIG, MODE, plan_of, run_here, step

from mezzo.tipc import PROFILES, Allowances, MachineInfo, adapt_plan, add_checks, make_plan, write_certificate

LINE = (
    "2026-11-15 15:00:00 [INFO]\t[TRAIN] epoch: 1, iter: {i}/9, loss: {loss}, lr: 0.01, batch_cost: 0.1, ips: {ips} x"
)
OPERATORS = "\n".join(
    (
        f"<{' op list ':-^120}>",
        f"<{' Op Name ':-^40} | -- FP16 Calls --- | -- BF16 Calls --- | --- FP32 Calls--- | -- Other Calls -->",
        "  convolution                             |  {half}                |  0                |  {full}               |  0",
        f"<{' op count: 1 ':-^120}>",
    )
)


def training(losses, ips=10.0, half=4, full=0, more=""):
    lines = [LINE.format(i=i + 1, loss=loss, ips=ips) for i, loss in enumerate(losses)]
    return "\n".join([OPERATORS.format(half=half, full=full), *lines, more])


def certificate(tmp_path, mixed, full, export="maximum error of fp32: 1.0e-06", gpus="none", options=""):
    """Run a chain whose commands print what they are given, and judge it."""
    for name, text in (("mixed", mixed), ("full", full), ("export", export)):
        (tmp_path / f"{name}.txt").write_text(text)
    plan = plan_of(
        step("train-1", "cat mixed.txt # --amp_level O1 --log_ops", labels={"trainer": "amp_train"}),
        step("check-1", "cat full.txt", kind="check", status=None, labels={"of": "train-1"}),
        step("export-1", f"cat export.txt # {options} --y", needs=["train-1"]),
    )
    plan = replace(plan, steps=tuple(replace(each, log=f"run/{each.name}.log") for each in plan.steps))
    run_here(tmp_path, plan, machine=MachineInfo(0, 2, {"GPUs": gpus}, {"torch": "2"}))
    said = []
    result = write_certificate(tmp_path / "run", said.append)
    content = json.loads((tmp_path / "run/certificate.json").read_text())
    return result, {check["name"]: check for check in content["checks"]}, content, said


FALLING = [2.0, 1.5, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_sound_chain_is_certified_with_all_that_is_needed_to_repeat_it(tmp_path):
    result, checks, content, said = certificate(tmp_path, training(FALLING, 12), training(FALLING, 10))
    assert result == 0
    assert content["passed"] is True
    assert {name: check["passed"] for name, check in checks.items()} == {
        "loss curve of train-1": True,
        "white operators of train-1 in half": True,
        "parity of export-1": True,
        "CPU against GPU of export-1": None,
        "speed of train-1": True,
    }
    assert checks["speed of train-1"]["measured"] == "1.20x"
    assert checks["parity of export-1"]["measured"] == "1.00e-06"
    assert content["hashes"].keys() == {"config", "code"}
    assert content["versions"] == {"torch": "2"}
    assert [command["step"] for command in content["commands"]] == ["train-1", "check-1", "export-1"]
    assert any("loss curve of train-1: passed" in line for line in said)


@pytest.mark.parametrize(
    ("mixed", "name"),
    [
        (training([2.0] * 8), "loss curve of train-1"),  # it does not fall
        (training([*FALLING, "nan"]), "loss curve of train-1"),  # not finite
        (training(FALLING, half=1, full=9), "white operators of train-1 in half"),
    ],
)
def test_what_is_not_sound_is_not_certified(mixed, name, tmp_path):
    result, checks, content, said = certificate(tmp_path, mixed, training(FALLING))
    assert result == 1
    assert checks[name]["passed"] is False
    assert content["passed"] is False
    assert any("FAILED" in line for line in said)


def test_what_cannot_be_judged_is_said(tmp_path):
    _, checks, content, said = certificate(tmp_path, "nothing", "nothing", "nothing")
    assert content["passed"] is None
    assert {check["passed"] for check in checks.values()} == {None}
    assert checks["loss curve of train-1"]["text"] == "no loss in one of the two logs"
    assert checks["white operators of train-1 in half"]["text"] == "no table of operators in the log"
    assert checks["parity of export-1"]["text"] == "the log of the export names no error"
    assert checks["speed of train-1"]["text"] == "no speed in one of the two logs"
    assert any("not checked" in line for line in said)


def test_a_cpu_without_half_arithmetic_is_no_failure_but_no_proof(tmp_path):
    _, checks, _, _ = certificate(tmp_path, training(FALLING, half=0, full=9), training(FALLING))
    check = checks["white operators of train-1 in half"]
    assert check["passed"] is None
    assert "this CPU has no half arithmetic" in check["text"]
    (tmp_path / "gpu").mkdir()
    result = certificate(tmp_path / "gpu", training(FALLING, half=0, full=9), training(FALLING), gpus="one")
    assert result[1]["white operators of train-1 in half"]["passed"] is False


@pytest.mark.parametrize("option", ["--save_dir=e", "--save-inference-dir e"])
def test_exported_models_are_compared_where_the_command_put_them(tmp_path, monkeypatch, option):
    compared = []

    def broken(folder):
        compared.append(folder)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("mezzo.tipc._agreement.agreement", broken)
    logs = training(FALLING), training(FALLING)
    _, checks, _, _ = certificate(tmp_path, *logs, gpus="one", options=option)
    assert compared == []  # there is no model yet
    assert checks["CPU against GPU of export-1"]["passed"] is None
    (tmp_path / "e").mkdir()
    (tmp_path / "e/deploy.yaml").touch()
    _, checks, _, _ = certificate(tmp_path, *logs, gpus="one", options=option)
    assert compared == [tmp_path / "e"]
    assert "CUDA out of memory" in checks["CPU against GPU of export-1"]["text"]
    assert checks["loss curve of train-1"]["passed"]  # the other checks still count


def test_memory_is_reported_where_the_log_has_it(tmp_path):
    memory = "2026-11-15 15:00:00 [INFO]\tmax_mem_reserved: 900 MB, max_mem_allocated: {} MB"
    mixed, full = (training(FALLING, more=memory.format(n)) for n in (60, 100))
    assert certificate(tmp_path, mixed, full)[1]["memory of train-1"]["measured"] == "0.60x"


def test_each_mixed_training_gets_a_twin_in_float32(tmp_path):
    plan = make_plan(CONFIG, MODE, PROFILES["mezzo"])
    plan = adapt_plan(plan, root=tmp_path, gpus=0, allow=Allowances(), works=lambda word, ours: True)
    steps = {step.name: step for step in add_checks(plan).steps}
    assert " --log_ops" in steps["train-1"].bare
    assert " --log_ops" in steps["train-1"].status
    twin = steps["check-1"]
    assert "--precision fp32 --amp_level O0" in twin.bare
    assert "amp_train_gpus_0_autocast_null_float32 " in twin.bare
    assert twin.status is None
    assert twin.labels["of"] == "train-1"
    assert twin.log.endswith("/check-1.log")
    assert "--nproc_per_node=2" in steps["check-2"].bare
    assert add_checks(make_plan(CONFIG, MODE, PROFILES["seg"])) == make_plan(CONFIG, MODE, PROFILES["seg"])


def test_a_chain_without_mixed_training_has_nothing_to_certify(tmp_path):
    run_here(tmp_path, plan_of(step("train-1", "true")))
    assert write_certificate(tmp_path / "run", lambda line: None) == 0
    content = json.loads((tmp_path / "run/certificate.json").read_text())
    assert content["checks"][0]["text"] == "no mixed training of mezzo's own in this run"


def test_an_export_that_failed_is_said(tmp_path):
    run_here(tmp_path, plan_of(step("export-1", "exit 1")))
    write_certificate(tmp_path / "run", lambda line: None)
    content = json.loads((tmp_path / "run/certificate.json").read_text())
    assert content["checks"][0]["text"] == "the export failed: exit status 1"


def test_a_speed_that_was_measured_on_a_busy_machine_is_not_meaningful(tmp_path):
    certificate(tmp_path, training(FALLING, 0.5), training(FALLING, 10))
    path = tmp_path / "run/steps.jsonl"
    busy = {"cores": "2", "load": "7.90", "others": "0.610", "pressure": "0.950"}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**each, "load": busy}) + "\n" for each in records))
    said = []
    assert write_certificate(tmp_path / "run", said.append) == 0
    content = json.loads((tmp_path / "run/certificate.json").read_text())
    (check,) = (each for each in content["checks"] if each["name"] == "speed of train-1")
    assert (check["passed"], check["measured"]) == (None, "not meaningful")
    assert "train-1: other processes used 61% of the CPU" in check["text"]
    assert "0.5 samples/s mixed, 10.0 in float32" in check["text"]
    (line,) = (each for each in said if "speed of train-1" in each)
    assert line.startswith("certificate: speed of train-1: not meaningful: ")


def test_speeds_that_spread_are_not_meaningful(tmp_path):
    jumping = "\n".join(LINE.format(i=n + 1, loss=1.0, ips=ips) for n, ips in enumerate((1, 5, 30, 9, 40, 12)))
    _, checks, _, _ = certificate(tmp_path, jumping, training(FALLING, 10))
    assert checks["speed of train-1"]["measured"] == "not meaningful"
    assert "train-1: half of the 5 speeds in the log spread over" in checks["speed of train-1"]["text"]
    assert "check-1" not in checks["speed of train-1"]["text"]
