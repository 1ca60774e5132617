"""Kills a process before each thing that `CheckpointStore` does to the file system, and looks at what is left.

Run as a program by test_store_killed.py: `killed_save.py DIRECTORY ACTION`. Every try is a fork that dies at the n-th
event that Python reports (open, rename, mkdir, remove, ...), for n = 0, 1, ... until one lives. Prints one line of JSON a try:
what `latest` and the checkpoints hold afterwards, seen by a new store before and after `clean`.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mezzo.checkpoint import CheckpointStore, read_state, write_state

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}


def save(store: CheckpointStore, name: str, value: int) -> None:
    state = {"value": value, "tensor": torch.full((3,), float(value))}
    store.save(name, lambda folder: write_state(folder, state))


def prepare(directory: Path) -> None:
    store = CheckpointStore(directory, keep=2)
    for value in (1, 2, 3):
        save(store, f"iter_{value}", value)
    save(store, "best_model", 1)
    store.save_latest("iter_3")


def new(store: CheckpointStore) -> None:
    save(store, "iter_4", 4)
    store.save_latest("iter_4")


def replace(store: CheckpointStore) -> None:
    save(store, "best_model", 2)


def replace_latest(store: CheckpointStore) -> None:
    save(store, "iter_3", 33)
    store.save_latest("iter_3")


def prune(store: CheckpointStore) -> None:
    store.prune()


def die_at(event_number: int, root: Path, action: Callable[[CheckpointStore], None]) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and arguments and str(arguments[0]).startswith(str(root)):
            if seen == event_number:
                os._exit(9)
            seen += 1

    sys.addaudithook(hook)
    action(CheckpointStore(root, keep=2))
    os._exit(0)


def view(directory: Path) -> dict[str, object]:
    store = CheckpointStore(directory, keep=2)
    latest = store.latest()
    assert latest is not None
    whole = {p.name: read_state(p)["value"] for p in sorted(directory.iterdir()) if p.is_dir() and p.name[0] != "."}
    best = store.resume_from("best_model")
    assert best is not None
    return {"latest": read_state(latest)["value"], "best": read_state(best)["value"], "whole": whole}


def main(directory: Path, action: Callable[[CheckpointStore], None]) -> None:
    template = directory / "template"
    prepare(template)
    for event_number in range(500):
        root = directory / str(event_number)
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            die_at(event_number, root, action)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        before = view(root)
        CheckpointStore(root).clean()
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        print(json.dumps({"code": code, "before": before, "after": view(root), "left": left}))
        if code == 0:
            return


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        {"new": new, "replace": replace, "replace_latest": replace_latest, "prune": prune}[sys.argv[2]],
    )
