"""What a user sees of a run: on a terminal and in a pipe."""

import io

from rich.console import Console
from tipc_plans import plan_of, run_here, step

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
