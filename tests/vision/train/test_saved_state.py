"""A checkpoint that was edited so that its checksums fit: one line, and the session is as it was."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mezzo.checkpoint import CheckpointError, read_state, write_state
from mezzo.files import write_manifest
from mezzo.vision.train import resume
from tiny_session import OPTIMIZERS, STEPS, fingerprint, make_session, save_checkpoint, step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "iter_3"))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_checkpoint_fits_its_own_run(kind: str, precision: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, kind, precision)
    session = make_session(kind, precision)
    progress = resume(session, folder)
    assert (progress.step, progress.best, progress.best_step, progress.evaluations_without_gain) == (3, 0.5, 2, 1)
    step(session)


def put(path: str, value: Any) -> Callable[[dict[Any, Any]], None]:
    """Return a change: the entry at a path of keys, numbers included, gets a value."""

    def change(state: dict[Any, Any]) -> None:
        *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        node: Any = state
        for key in keys:
            node = node[key]
        node[last] = value

    return change


PROGRESS = [
    *[("step", value) for value in ("abc", 1.5, -5, True, None, STEPS + 1, 2**70, [3])],
    *[("best", value) for value in ("abc", True, [], -0.1, 1.5, float("inf"), torch.zeros(()))],
    *[("best_step", value) for value in (4, -1, 1.0, None)],
    *[("evaluations_without_gain", value) for value in (-1, 99, "1", False)],
]
WRONG = [(f"progress/{name}", value, name) for name, value in PROGRESS]
WRONG += [
    ("progress", 3, "progress"),
    ("progress", {}, "progress"),
    ("progress/more", 1, "more"),
    ("run", [], "dict"),
    ("run/seed", torch.zeros(3), "run"),
    ("counters", {}, "counters"),
    ("counters/1.num_batches_tracked", torch.tensor(3.0), "num_batches_tracked"),
    ("counters/1.num_batches_tracked", torch.tensor([3]), "num_batches_tracked"),
    ("counters/1.num_batches_tracked", torch.tensor(-3), "negative"),
    ("random", None, "random"),
    ("random/torch", torch.zeros(10, dtype=torch.uint8), "random"),
    ("random/torch", torch.zeros(5056), "torch"),
    ("random/torch", torch.full((5056,), 255, dtype=torch.uint8), "random"),
    ("random/torch", "abc", "torch"),
    ("random/numpy", [], "random"),
    ("random/numpy/0", "PCG64", "MT19937"),
    ("random/numpy/1", torch.zeros(623, dtype=torch.int64), "numpy"),
    ("random/numpy/1", torch.full((624,), -1), "numpy"),
    ("random/numpy/2", 625, "position"),
    ("random/numpy/4", float("nan"), "gauss"),
    ("random/python", [1, 2], "random"),
    ("random/python", ["a"] * 625, "python"),
    ("random/python/624", 10**6, "random"),
    ("optimizer", [], "optimizer"),
    ("optimizer/param_groups", [], "groups"),
    ("optimizer/param_groups/0/params", [0, 0, 1, 2, 3, 4], "only once"),
    ("optimizer/param_groups/0/lr", "abc", "lr"),
    ("optimizer/param_groups/0/lr", -1.0, "lr"),
    ("optimizer/param_groups/0/betas", (0.9, 1.5), "betas"),
    ("optimizer/param_groups/0/betas", (0.9,), "betas"),
    ("optimizer/param_groups/0/weight_decay", 10**400, "weight_decay"),
    ("optimizer/param_groups/0/capturable", True, "capturable"),
    ("optimizer/state/9", {}, "parameter"),
    ("optimizer/state/0", {"step": torch.tensor(1.0)}, "exp_avg"),
    ("optimizer/state/0/exp_avg", torch.zeros(2, 2), "exp_avg"),
    ("optimizer/state/0/exp_avg", torch.zeros(2, 3, dtype=torch.int64), "exp_avg"),
    ("optimizer/state/0/exp_avg", None, "exp_avg"),
    ("optimizer/state/0/step", torch.tensor(-1.0), "step"),
    ("optimizer/state/0/step", torch.ones(2), "step"),
    ("precision", 3, "precision"),
    ("precision/scale", "abc", "precision"),
    ("precision/scale", float("nan"), "scale"),
    ("precision/incr_ratio", 10**400, "precision"),
    ("precision/incr_count", -1, "incr_count"),
    ("backend", "gcc", "backend"),
    ("backend", ["inductor"], "backend"),
    ("ema", {}, "EMA"),
    ("ema/updates", -1, "updates"),
    ("ema/updates", 1.5, "updates"),
    ("ema/values/0.weight", torch.zeros(1), "0.weight"),
    ("ema/values/0.weight", torch.zeros(2, 3, dtype=torch.float64), "0.weight"),
    ("ema/values/more", torch.zeros(1), "more"),
]


@pytest.mark.parametrize(("path", "value", "word"), WRONG, ids=lambda item: str(item)[:30])
def test_a_wrong_entry_is_named_and_nothing_changes(path: str, value: Any, word: str, folder: Path) -> None:
    state = read_state(folder)
    put(path, value)(state)
    write_state(folder, state)
    session = make_session()
    before = fingerprint(session)
    with pytest.raises(CheckpointError) as error:
        resume(session, folder)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert fingerprint(session) == before


@pytest.mark.parametrize("name", ["progress", "optimizer", "counters", "precision", "ema", "random", "run"])
def test_a_missing_part_is_named(name: str, folder: Path) -> None:
    state = read_state(folder)
    del state[name]
    write_state(folder, state)
    session = make_session()
    before = fingerprint(session)
    with pytest.raises(CheckpointError, match=name):
        resume(session, folder)
    assert fingerprint(session) == before


WEIGHTS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "missing": lambda weights: weights.__delitem__("2.weight"),
    "added": lambda weights: weights.update(more=torch.zeros(1)),
    "another shape": lambda weights: weights.update({"2.weight": torch.zeros(3, 2)}),
    "another dtype": lambda weights: weights.update({"2.weight": torch.zeros(2, 2, dtype=torch.int64)}),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(damage: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    WEIGHTS[damage](weights)
    save_file(weights, folder / "model.safetensors")
    write_manifest(folder)
    session = make_session()
    before = fingerprint(session)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        resume(session, folder)
    assert fingerprint(session) == before
