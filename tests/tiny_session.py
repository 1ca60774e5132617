"""A session with a network of 26 numbers: enough to save, damage and resume in a millisecond."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo.checkpoint import CheckpointStore
from mezzo.model.parallel import World
from mezzo.model.precision import make_precision
from mezzo.vision import train
from mezzo.vision.options import RunOptions
from mezzo.vision.train import Ema, RunProgress
from mezzo.vision.train.session import Session

STEPS = 14
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
}


def make_session(kind: str = "adamw", precision: str = "fp16", *, use_ema: bool = True) -> Session:
    """Return a session that can be saved and resumed, but not trained by the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = OPTIMIZERS[kind](model.parameters())
    chosen = make_precision(precision, "O2")
    chosen.prepare(model, optimizer)
    parts: dict[str, Any] = {
        "recipe": SimpleNamespace(iters=STEPS, task="segmentation", create_model=None),
        "options": RunOptions(precision=precision, use_ema=use_ema),
        "world": World(0, 1, torch.device("cpu")),
        "stream": SimpleNamespace(seed=0, length=12, global_batch_size=4, steps_per_epoch=3),
        "task": None,
        "loader": None,
        "to_input": None,
    }
    ema = Ema(model) if use_ema else None
    return Session(model=model, wrapped=model, optimizer=optimizer, precision=chosen, ema=ema, notices=[], **parts)


def step(session: Session) -> None:
    """Train a step on noise."""
    with session.precision.autocast():
        loss = session.model(torch.randn(4, 3)).float().square().sum()
    session.precision.backward(loss)
    session.precision.step(session.optimizer, max_norm=1.0)
    session.optimizer.zero_grad()
    if session.ema is not None:
        session.ema.update()


def save_checkpoint(directory: Path, kind: str = "adamw", precision: str = "fp16") -> Path:
    """Train some steps and save; return the folder."""
    session = make_session(kind, precision)
    for _ in range(3):
        step(session)
    return train.save_checkpoint(session, CheckpointStore(directory), RunProgress(3, 0.5, 2, 1))


def fingerprint(session: Session) -> list[Any]:
    """Return all that a resume may change, bit for bit."""
    states = [session.model.state_dict(), session.optimizer.state_dict(), session.precision.state_dict()]
    states += [session.ema.state_dict() if session.ema is not None else None, session.notices]
    states += [torch.get_rng_state(), np.random.get_state()[1:], random.getstate()]
    return [frozen(state) for state in states]


def frozen(tree: Any) -> Any:
    """Return a tree with its tensors as bytes, so that == compares bit for bit."""
    if isinstance(tree, Tensor):
        flat = tree.detach().contiguous().reshape(-1).view(torch.uint8) if tree.numel() else torch.empty(0)
        return str(tree.dtype), tuple(tree.shape), bytes(flat.tolist())
    if isinstance(tree, np.ndarray):
        return tree.tobytes()
    if isinstance(tree, dict):
        return [(str(key), frozen(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [frozen(item) for item in tree]
    return repr(tree)
