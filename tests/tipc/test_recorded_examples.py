"""The recorded commands of real repositories (tests/tipc/examples.jsonl): planned, and run with a stub in place of Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tipc_plans import EXAMPLES, planned_lines

from mezzo.tipc import PROFILES, make_plan

STUB = Path(__file__).parent / "tipc_stub.py"

# Two of the recordings are of scripts that differ from the profile they are filed under; the repository decides.
BY_REPOSITORY = {"JunnYu/ConvBERT-Prod": "nlp-early", "PaddlePaddle/PARL": "parl"}


def profile_of(example):
    return BY_REPOSITORY.get(example["repo"], example["profile"])


def name_of(example):
    return f"{profile_of(example)}-{example['mode']}-{Path(example['path']).parent.name}-{example['variant']}"


def run_by_stub(example, folder):
    """Run an example as the scripts would; returns what the stub saw, and the lines of the status file."""
    root, programs = folder / "root", folder / "programs"
    (root / "deploy").mkdir(parents=True)
    programs.mkdir()
    called = {argv["argv"][0] for argv in example["commands"]}
    for name in called | {"sleep", "rm", "pip", "xparl"}:
        (programs / name).write_text(f'#!/bin/bash\nexec {sys.executable} -S {STUB} {name} "$@"\n')
        (programs / name).chmod(0o755)
    (root / "config.txt").write_text(example["config"])
    if profile_of(example) == "clas" and example["mode"] == "whole_infer":
        model = example["config"].split("infer_model:")[1].split("\n")[0]
        (root / model / "quant_post_static_model").mkdir(parents=True)  # the recording has made it before
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STUB_RECORD": str(folder / "calls.jsonl"),
        "STUB_ROOT": str(root),
    }
    env |= {"STUB_VARIANT": example["variant"], "STUB_CONFIG": str(root / "config.txt")}
    command = [
        sys.executable,
        "-m",
        "mezzo",
        "tipc",
        "run",
        "--compat",
        "--profile",
        profile_of(example),
        "config.txt",
        example["mode"],
    ]
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    calls = (
        [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
        if (folder / "calls.jsonl").exists()
        else []
    )
    files = sorted(str(path.relative_to(root)) for path in root.rglob("results*.log"))
    lines = [line for name in files for line in (root / name).read_text().splitlines()]
    return result, calls, files, [line.replace(str(root), "$ROOT") for line in lines]


def expected(command):
    return {
        "argv": command["argv"],
        "env": command.get("env") or {},
        "cwd": command.get("cwd") or "",
        "stdout": command.get("stdout") or "",
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_the_status_lines_of_a_plan_are_the_recorded_ones(example):
    plan = make_plan(example["config"], example["mode"], PROFILES[profile_of(example)])
    if example["variant"] != "ok":
        first = next(step.name for step in plan.steps if step.fallback)
        plan = make_plan(example["config"], example["mode"], PROFILES[profile_of(example)], fallback_from=first)
    failed = {" ".join(command["argv"]) for command in example["commands"] if command.get("exit")}
    lines, wanted = planned_lines(plan, failed), example["status"]
    if any(step.pattern for step in plan.steps):  # wildcards are expanded when the files are there: the run below
        lines = [line for line in lines if "*" not in line]
        wanted = [line for line in wanted if "-run/" not in line]
    assert lines == wanted


@pytest.mark.slow  # 91 runs of about 0.4 to 2 s
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_compatible_run_is_the_recorded_one(example, tmp_path):
    result, calls, files, lines = run_by_stub(example, tmp_path)
    assert [{**call, "stdout": call["stdout"]} for call in calls] == [
        expected(command) for command in example["commands"]
    ], result.stderr
    assert lines == example["status"]
    if example["status"]:
        assert files == example["status_file"]
    failed = any(command.get("exit") for command in example["commands"])
    assert result.returncode == (1 if failed else 0 if example["commands"] else 3), result.stderr


@pytest.mark.parametrize("index", [0, 12, 24, 36])
def test_some_of_the_runs_always(index, tmp_path):
    """One that passes, one that fails, one that changes folders, one that expands wildcards."""
    example = EXAMPLES[index]
    result, calls, _, lines = run_by_stub(example, tmp_path)
    assert calls == [expected(command) for command in example["commands"]], result.stderr
    assert lines == example["status"]
