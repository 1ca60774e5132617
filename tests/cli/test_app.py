import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from mezzo.cli import _app, _check
from mezzo.cli._app import run
from mezzo.errors import MezzoError, RunError
from mezzo.report import markdown_table as table


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
        _app.main(["--nonsense"])
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


def test_check_draws_a_table_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _check._print_rows([("torch", "2.13")])
    assert "│" in capsys.readouterr().out


def test_check_is_1_on_a_gpu_that_is_too_old(capsys, monkeypatch):
    from mezzo.amp import Environment, Gpu, check_environment

    off = {name: False for name in ("float16", "bfloat16", "fp8", "tf32", "tensor_cores")}
    here = check_environment()
    gpu = Gpu(name="Tesla K40m", capability=(3, 5), memory_gib=12.0, **off)
    fields = {name: getattr(here, name) for name in Environment.__dataclass_fields__}
    monkeypatch.setattr("mezzo.amp.check_environment", lambda: Environment(**{**fields, "gpus": (gpu,)}))
    assert run(["check"]) == 1
    assert "(3, 5)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["check", "--dtype", "bfloat"],
            "unknown --dtype 'bfloat'; did you mean 'bfloat16'? allowed: float16, bfloat16",
        ),
        (["chek"], "No such command 'chek'"),
        (["check", "--jso"], "No such option: --jso"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_2(capsys, arguments, line):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mezzo: {line}")
    assert captured.err.count("\n") == 1


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


def test_tables_show_names_as_they_are(capsys, monkeypatch):
    monkeypatch.setattr(_check.Console, "is_terminal", True)
    _check._print_rows([("[bold]GPU[/bold]", "a\x1b[31mb\x1b]0;title\x07")])
    shown = capsys.readouterr().out
    assert "[bold]GPU[/bold]" in shown
    assert "ab" in shown
    assert "title" not in shown
    rows = table([["name"], ["a\nb\x1b[31m"]])
    assert rows.count("\n") == 2
    assert "\x1b" not in rows
