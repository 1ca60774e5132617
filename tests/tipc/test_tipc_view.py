"""What a user sees of a run: on a terminal and in a pipe."""

import io

from rich.console import Console
from tipc_plans import plan_of, run_here, step

from mezzo.tipc._status import print_status
from mezzo.tipc._view import Board, Lines, Records, last_lines, view_for


def test_a_terminal_shows_steps_times_and_tails(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    plan = plan_of(step("train-1", "echo hello; exit 3"), step("infer-1", "true", needs=["train-1"]))
    board = Board(console, plan.steps)
    with board:
        run_here(tmp_path, plan, board)
        board.started(plan.steps[0], tmp_path / "out/train-1.log")
        with console.capture() as captured:
            console.print(board._drawn())
    drawn = captured.get()
    assert "running" in drawn
    assert "hello" in drawn
    assert "train-1 failed" in drawn
    assert "Run failed with command" in console.file.getvalue()


def test_lines_in_a_pipe_and_json(capsys):
    assert type(view_for((), False)) is Lines  # a test's output is no terminal
    assert type(view_for((), True)) is Records


def test_tails_are_printable_and_bounded(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10000 + b"\n\x1b[31mred\x00\n\nlast\n")
    assert last_lines(log, 2) == ["[31mred", "last"]
    assert last_lines(tmp_path / "none", 2) == []


def test_names_do_not_command_the_terminal(tmp_path, capsys):
    hostile = "x\x1b]0;title\x07\x1b[2J[bold]y[/bold]"
    plan = plan_of(step("train-1", f"echo {hostile!r}; exit 3", labels={"trainer": hostile}))
    with Lines() as lines:
        run_here(tmp_path, plan, lines)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[bold]y[/bold]" in shown
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Board(console, plan.steps) as board:
        run_here(tmp_path, plan, board)
        board.say(hostile)
    assert "\x1b]0;" not in console.file.getvalue()
    assert "\x1b[2J[bold]" not in console.file.getvalue()
    assert "[bold]y[/bold]" in console.file.getvalue()


def test_a_status_line_keeps_the_scripts_colour_and_no_other(capsys):
    print_status("\x1b[33m Run failed with command - \x1b[2Jx\x1b]0;title\x07\x1b[0m")
    assert capsys.readouterr().out == "\x1b[33m Run failed with command - x\x1b[0m\n"
