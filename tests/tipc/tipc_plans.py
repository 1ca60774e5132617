"""Small plans and views for tests of the runner."""

from pathlib import Path

from mezzo.tipc import Plan, Step
from mezzo.tipc._machine import Machine
from mezzo.tipc._run import RunOptions, run_plan
from mezzo.tipc._view import Lines


def plan_of(*steps, model="m", mode="lite_train_lite_infer"):
    return Plan(model, mode, "seg", "out", "out/results_python.log", False, tuple(steps))


def step(name, command, *, needs=(), kind=None, **more):
    more.setdefault("status", f" - m - {command} - ")
    return Step(name, kind or name.split("-")[0], command, command, log=f"out/{name}.log", needs=tuple(needs), **more)


def run_here(folder, plan, view=None, machine=None, **options):
    """Run a plan in a folder and return status, records by step, and the lines that were said."""
    from mezzo.tipc._load import load_run

    lines = []
    result = run_plan(
        plan,
        root=folder,
        folder=folder / "run",
        config=Path("c.txt"),
        config_text="text",
        machine=machine or Machine(0, 2, {"GPUs": "none"}, {}),
        options=RunOptions(**options),
        view=view or Lines(lines.append),
    )
    records = {record.step: record for record in load_run(folder / "run").records}
    return result, records, lines
