"""Checkpoints of trainings and of models, damaged or edited so that their checksums fit; and logs of scalars."""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from fuzzing import Target
from mutate import LEAVES, mutate_bytes, mutate_text, mutate_tree
from torch import nn

from mezzo import Model
from mezzo.checkpoint import CheckpointStore, find_weights
from mezzo.errors import MezzoError
from mezzo.files import write_manifest
from mezzo.vision.train import ScalarLog, find_checkpoint, read_scalars, resume

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_session import OPTIMIZERS, fingerprint, frozen, make_session, save_checkpoint, step

_JSON = ("state.json", "manifest.json")


@functools.cache
def _run() -> Path:
    """Return a folder with a checkpoint of each optimizer, made once."""
    folder = Path(tempfile.mkdtemp(prefix="mezzo-seed-"))
    for kind in OPTIMIZERS:
        save_checkpoint(folder / kind, kind)
    return folder


@functools.cache
def _model() -> Path:
    return _trained().save(Path(tempfile.mkdtemp(prefix="mezzo-seed-")) / "model")


def _trained() -> Model:
    torch.manual_seed(1)
    model = Model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), device="cpu")
    model.prepare(torch.optim.Adam(model.parameters(), lr=0.1), nn.MSELoss(), amp_configs="O2")
    for _ in range(2):
        model.train_batch(torch.ones(4, 3), torch.zeros(4, 2))
    return model


def _damage(rng: random.Random, folder: Path) -> None:
    """Change one file of a checkpoint or more; mostly the manifest is made to fit, as whoever edits a state would do."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        name = rng.choice([*names, *(["state.json"] * len(names))])
        _damage_file(rng, folder, folder / name)
    if rng.random() < 0.8:
        write_manifest(folder)


def _damage_file(rng: random.Random, folder: Path, path: Path) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        path.unlink(missing_ok=True)
    elif kind == 1:
        (folder / rng.choice(("more", "model.pt", ".hidden", path.name))).write_bytes(rng.randbytes(40))
    elif path.exists():
        data = path.read_bytes()
        changed = _changed_tree(rng, data) if path.name in _JSON and kind < 7 else None
        path.write_bytes(mutate_bytes(rng, data) if changed is None else changed)


def _changed_tree(rng: random.Random, data: bytes) -> bytes | None:
    """Return JSON with other nodes, mostly of the state itself; None if it was damaged before."""
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    if isinstance(tree, dict) and "tree" in tree and rng.random() < 0.9:
        tree = {**tree, "tree": mutate_tree(rng, tree["tree"])}
    else:
        tree = mutate_tree(rng, tree)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def make_checkpoint(rng: random.Random, folder: Path) -> Path:
    kind = rng.choice(sorted(OPTIMIZERS))
    shutil.copytree(_run() / kind, folder / kind)
    _damage(rng, folder / kind / "iter_3")
    return folder / kind


def read_checkpoint(run: Path) -> None:
    """Resume: a refused checkpoint changes nothing, and one that is taken can be trained on."""
    session = make_session(run.name)
    before = fingerprint(session)
    try:
        folder, _ = find_checkpoint(CheckpointStore(run), run)
        assert folder is not None
        progress = resume(session, folder)
    except MezzoError:
        assert fingerprint(session) == before, "a refused checkpoint changed the session"
        raise
    assert type(progress.step) is int
    assert 0 <= progress.step <= session.steps
    step(session)
    random.random()
    np.random.normal()
    torch.rand(3)


def read_auto(run: Path) -> None:
    find_checkpoint(CheckpointStore(run), "auto")
    find_weights(run)


def make_model(rng: random.Random, folder: Path) -> Path:
    shutil.copytree(_model(), folder / "model")
    _damage(rng, folder / "model")
    return folder / "model"


def read_model(folder: Path) -> None:
    """Load: a refused folder changes nothing, and one that is taken can be trained on."""
    model = _trained()

    def everything() -> object:
        assert model.optimizer is not None
        assert model.scaler is not None
        return frozen([model.network.state_dict(), model.optimizer.state_dict(), model.scaler.state_dict()])

    before = everything()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other rules of precision
            model.load(folder)
    except MezzoError:
        assert everything() == before, "a refused folder changed the model"
        raise
    model.train_batch(torch.ones(4, 3), torch.zeros(4, 2))


def make_scalars(rng: random.Random, folder: Path) -> Path:
    path = folder / "scalars.jsonl"
    points = [{"step": step, "loss": 1 / (step + 1), "lr": "nan"} for step in range(5)]
    kind = rng.randrange(4)
    if kind == 0:
        points[rng.randrange(5)] = mutate_tree(rng, points[0])
    elif kind == 1:
        points.insert(rng.randrange(5), rng.choice(LEAVES))  # type: ignore[arg-type]
    text = "".join(json.dumps(point) + "\n" for point in points)
    if kind == 2:
        text = mutate_text(rng, text)
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(mutate_bytes(rng, data) if kind == 3 else data)
    return path


def read_log(path: Path) -> None:
    read_scalars(path)
    with ScalarLog(path.parent, resume_at=3, with_tensorboard=False) as log:
        log.add(3, loss=1.0)
    assert read_scalars(path)[-1]["step"] == 3


TARGETS = [
    Target("checkpoint", make_checkpoint, read_checkpoint),
    Target("resume_auto", make_checkpoint, read_auto),
    Target("saved_model", make_model, read_model),
    Target("scalars", make_scalars, read_log),
]
