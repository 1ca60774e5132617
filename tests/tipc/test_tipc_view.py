"""What a user sees of a run: on a terminal and in a pipe."""

import io

from rich.console import Console
from tipc_plans import plan_of, run_here, step

from mezzo.cli import run
from mezzo.tipc import JsonProgress, LineProgress, TableProgress, progress_for

HOSTILE = "x\x1b]0;title\x07\x1b[2J[bold]y[/bold]"


def test_a_terminal_shows_steps_times_and_the_ends_of_logs(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    plan = plan_of(step("train-1", "echo hello; exit 3"), step("infer-1", "true", needs=["train-1"]))
    with TableProgress(console, plan.steps) as table:
        run_here(tmp_path, plan, table)
        table.started(plan.steps[0], tmp_path / "out/train-1.log")
        with console.capture() as captured:
            console.print(table.live.get_renderable())
    drawn = captured.get()
    assert "running" in drawn
    assert "hello" in drawn
    assert "train-1 failed" in drawn
    assert "Run failed with command" in console.file.getvalue()


def test_lines_in_a_pipe_and_json(capsys):
    assert type(progress_for((), False)) is LineProgress  # the output of a test is no terminal
    assert type(progress_for((), True)) is JsonProgress


def test_ends_of_logs_are_printable_and_short(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * 10000 + b"\n\x1b[31mred\x00\n\n1\n2\nlast\n")
    plan = plan_of(step("train-1", "true"), step("train-2", "true"))
    console = Console(file=io.StringIO(), width=120)
    table = TableProgress(console, plan.steps)
    table.started(plan.steps[0], tmp_path / "log")
    table.started(plan.steps[1], tmp_path / "none")
    console.print(table.live.get_renderable())
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines[-3:] == ["1", "2", "last"]
    assert not any("red" in line or "xx" in line for line in lines)


def test_names_do_not_control_the_terminal(tmp_path, capsys):
    plan = plan_of(step("train-1", f"echo {HOSTILE!r}; exit 3", labels={"trainer": HOSTILE}))
    with LineProgress() as lines:
        run_here(tmp_path, plan, lines)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[bold]y[/bold]" in shown
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with TableProgress(console, plan.steps) as table:
        run_here(tmp_path, plan, table)
        table.say(HOSTILE)
    assert "\x1b]0;" not in console.file.getvalue()
    assert "\x1b[2J[bold]" not in console.file.getvalue()
    assert "[bold]y[/bold]" in console.file.getvalue()


def test_a_status_line_has_the_scripts_colour_and_no_other(tmp_path, monkeypatch, capsys):
    text = ["==", "model_name:m", "python:true", "gpu_list:-1", *["x:null"] * 10, "trainer:t", f"t:'{HOSTILE}'"]
    (tmp_path / "c.txt").write_text("\n".join(text))
    monkeypatch.chdir(tmp_path)
    assert run(["tipc", "run", "--compat", "--profile", "template", "c.txt", "lite_train_lite_infer"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("\x1b[33m Run successfully with command - true 'x[bold]y[/bold]'")
    assert line.endswith("\x1b[0m")
    assert line.count("\x1b") == 2
