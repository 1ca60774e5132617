"""Weights that a checkpoint's folder stands for are compared with its manifest."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mezzo.checkpoint import CheckpointError, CheckpointStore, find_weights, save_weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    store = CheckpointStore(tmp_path)
    store.save("iter_1", lambda folder: save_weights(folder, nn.Linear(3, 2)))
    store.save("iter_2", lambda folder: save_weights(folder, nn.Linear(3, 2)))
    return tmp_path


def test_damaged_weights_of_a_checkpoint_are_refused(run: Path) -> None:
    file = run / "iter_2" / "model.safetensors"
    assert find_weights(run / "iter_2") == find_weights(run) == file
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)
    for given in (run, run / "iter_2"):
        with pytest.raises(CheckpointError, match=r"iter_2/model\.safetensors: is not the file that was written"):
            find_weights(given)


def test_weights_of_another_iteration_are_refused(run: Path) -> None:
    (run / "iter_2" / "model.safetensors").write_bytes((run / "iter_1" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"iter_2/model\.safetensors"):
        find_weights(run / "iter_2")


def test_only_the_file_that_is_taken_is_checked_and_old_folders_have_no_manifest(run: Path) -> None:
    (run / "iter_2" / "note.txt").write_text("mine")
    assert find_weights(run / "iter_2").name == "model.safetensors"
    (run / "iter_2" / "manifest.json").unlink()
    (run / "iter_2" / "model.safetensors").write_bytes(b"other")
    assert find_weights(run / "iter_2").read_bytes() == b"other"
