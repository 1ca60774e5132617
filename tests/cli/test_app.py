import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from mezzo.cli import main, run
from mezzo.errors import MezzoError, RunError


def run_failing(monkeypatch, error):
    """Run `mezzo check` with a body that raises."""

    def fail(*_):
        raise error

    monkeypatch.setattr("mezzo.amp.check_environment", fail)
    return run(["check"])


def test_version_is_the_installed_one(capsys, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.3")
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "mezzo 1.2.3\n"


def test_version_of_bare_sources_is_no_error(capsys, monkeypatch):
    def fail(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)
    assert run(["--version"]) == 0
    assert "not installed" in capsys.readouterr().out


def test_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "mezzo.cli", "chek"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "mezzo: No such command 'chek'. Did you mean 'check'?\n")


def test_no_arguments_show_the_help(capsys):
    assert run([]) == 0
    assert "check" in capsys.readouterr().out


def test_main_leaves_with_the_exit_code():
    with pytest.raises(SystemExit) as left:
        main(["--nonsense"])
    assert left.value.code == 2


def test_check_prints_the_environment_as_text(capsys):
    assert run(["check"]) == 0
    out = capsys.readouterr().out
    assert str(torch.__version__) in out
    assert "usable" in out.splitlines()[-1]


def test_check_prints_json_alone(capsys):
    assert run(["check", "--json", "--dtype", "bfloat16"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dtype"] == "bfloat16"
    assert data["amp_usable"] is True


def pretend_gpu(monkeypatch, name, capability):
    """Let `mezzo check` find one GPU without units for half precision."""
    from mezzo.amp import Environment, Gpu, check_environment

    off = {field: False for field in ("float16", "bfloat16", "fp8", "tf32", "tensor_cores")}
    found = check_environment()
    gpu = Gpu(name=name, capability=capability, memory_gib=12.0, **off)
    fields = {field: getattr(found, field) for field in Environment.__dataclass_fields__}
    monkeypatch.setattr("mezzo.amp.check_environment", lambda: Environment(**{**fields, "gpus": (gpu,)}))


def test_check_is_1_on_a_gpu_that_is_too_old(capsys, monkeypatch):
    pretend_gpu(monkeypatch, "Tesla K40m", (3, 5))
    assert run(["check"]) == 1
    assert "(3, 5)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "exit_code"), [(MezzoError("a\nb"), 2), (ValueError("a\n  b"), 2), (RunError("a b"), 1)]
)
def test_errors_of_the_user_are_one_line_with_their_exit_code(capsys, monkeypatch, error, exit_code):
    assert run_failing(monkeypatch, error) == exit_code
    assert capsys.readouterr().err == "mezzo: a b\n"


def test_interrupt_is_130_without_a_traceback(capsys, monkeypatch):
    assert run_failing(monkeypatch, KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_failing(monkeypatch, ZeroDivisionError())


HOSTILE = "x\x1b]0;title\x07\x1b[2J\x9b31m\r[bold]y[/bold]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["infer", "--model", HOSTILE, "--image-path", HOSTILE],
        ["convert", HOSTILE, f"{HOSTILE}.safetensors"],
        ["tipc", "report", HOSTILE],
        ["tipc", "run", HOSTILE, "lite_train_lite_infer"],
        ["train", "--config", HOSTILE],
        [HOSTILE],
        ["check", f"--{HOSTILE}"],
    ],
    ids=lambda arguments: " ".join(arguments[:1]).split("x")[0],
)
def test_names_do_not_command_the_terminal(capsys, arguments):
    assert run(arguments) == 2
    line = capsys.readouterr().err
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert "[bold]y[/bold]" in line


def test_a_table_on_a_terminal_shows_names_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    pretend_gpu(monkeypatch, "[bold]GPU[/bold] a\x1b[31mb\x1b]0;title\x07", (3, 5))
    run(["check"])
    shown = capsys.readouterr().out
    assert "│" in shown
    assert "[bold]GPU[/bold] ab" in shown
    assert "title" not in shown


def test_a_table_without_a_terminal_is_aligned(capsys):
    assert run(["models", "pp_humanseg_*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].strip("|-") == ""
