"""What a step takes over from the steps that it needs: their verdict, and the path of their weights.

Both functions depend on records and files only, so the runner and a worker of a cluster decide in the same way.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._record import Record


def all_needs(plan: Plan, step: PlanStep) -> tuple[str, ...]:
    """Return the names of the steps that a step needs, directly or through others, in the order of the plan."""
    steps = {each.name: each for each in plan.steps}
    found: set[str] = set()
    open_names = list(step.needs)
    while open_names:
        name = open_names.pop()
        if name in steps and name not in found:
            found.add(name)
            open_names += steps[name].needs
    return tuple(each.name for each in plan.steps if each.name in found)


def why_blocked(step: PlanStep, records: Mapping[str, Record]) -> str:
    """Return why a step must not run after what it needs, such as 'train-1 failed'; empty: it can run."""
    bad = [name for name in step.needs if name in records and records[name].status != "passed"]
    return f"{bad[0]} {records[bad[0]].status}" if bad else ""


def other_weights(root: Path, training: PlanStep) -> Path | None:
    """Return the weights that the scripts fall back to; None if the expected file exists."""
    expected = root / training.checkpoint
    if not training.fallback or expected.exists():
        return None
    places = (parent / training.fallback for parent in expected.parents)
    return next((place for place in places if place.exists()), None)


def with_existing_weights(plan: Plan, root: Path, step: PlanStep, records: Mapping[str, Record]) -> PlanStep:
    """Return a step with the paths of the weights that the trainings it needs have left."""
    for training in plan.steps:
        if training.kind != "train" or training.checkpoint not in step.bare or not training.checkpoint:
            continue
        record = records.get(training.name)
        if record is not None and record.status == "passed" and (other := other_weights(root, training)) is not None:
            prefix = "./" if training.checkpoint.startswith("./") else ""
            step = step.with_text(training.checkpoint, prefix + os.path.relpath(other, root))
    return step
