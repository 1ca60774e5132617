"""All targets, from the modules `targets_*.py` beside this file."""

from __future__ import annotations

import importlib
from pathlib import Path

from fuzzing import Target


def all_targets() -> dict[str, Target]:
    """Return the targets by name."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("targets_*.py"))
    found = [target for name in modules for target in importlib.import_module(name).TARGETS]
    names = [target.name for target in found]
    assert len(set(names)) == len(names), f"two targets have one name: {names}"
    return {target.name: target for target in found}
