"""The Job that `mezzo tipc matrix --on k8s --dry-run` prints."""

import re
import shlex
import subprocess

import pytest
import yaml
from tipc_plans import MODE

from mezzo.cli import run

WORDS = ["tipc", "matrix", "a.txt", "with blank.txt", "--on", "k8s", "--dry-run", "--check"]


def job(capsys, *more):
    assert run([*WORDS, *more]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_each_pod_runs_the_text_of_its_index(capsys, tmp_path):
    made = job(capsys, "--step-limit", "60", "--step-memory", "4G")
    assert made["spec"]["completions"] == 2
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "4096Mi"
    stub = tmp_path / "mezzo"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "1"}
    done = subprocess.run(container["command"], env=env, capture_output=True, text=True, check=True)
    expected = "tipc run --resume --check --step-limit 60 -- 'with blank.txt' lite_train_lite_infer"
    assert done.stdout.splitlines() == shlex.split(expected)


def test_kubernetes_and_the_shell_expand_nothing_of_a_name(capsys, tmp_path):
    name = "a $$(HOSTNAME) $(HOSTNAME) `id` 'q\" #: !x\n- b.txt"
    (container,) = job(capsys, name, "--history", "$(A) b")["spec"]["template"]["spec"]["containers"]
    expanded = [
        re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else "EXPANDED", word)
        for word in container["command"]
    ]  # as kubelet does
    stub = tmp_path / "mezzo"
    stub.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    stub.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "2"}
    done = subprocess.run(expanded, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[2:-1] == ["--resume", "--check", "--history", "$(A) b", "--", name, MODE]


@pytest.mark.cluster
def test_the_job_fits_the_schema_of_kubernetes(capsys):
    validate = pytest.importorskip("kubernetes_validate", reason="no schema here: `make test-ray` installs it")
    validate.validate(job(capsys, "--step-memory", "512M"), "1.31", strict=True)
    broken = job(capsys)
    broken["spec"]["backoffLimitPerIndex"] = "three"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)
