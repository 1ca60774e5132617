"""Random states around runs that are compared."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from mezzo.bench import find_workload
from mezzo.trial import random_states_kept, seed_all


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three GPUs, as far as their random states go; the list gets those that are given back."""
    places: list[int] = []

    def put_back(state: Tensor, device: int) -> None:
        assert state.item() == device
        places.append(device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.tensor)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back)
    return places


@pytest.mark.parametrize(
    ("gpus", "in_use", "expected"),
    [((), False, []), ((), True, [0, 1, 2]), ([1], True, [0, 1, 2]), ([torch.device("cuda", 1)], False, [0, 1, 2])],
)
def test_the_states_of_all_gpus_are_given_back(
    restored: list[int], monkeypatch: pytest.MonkeyPatch, gpus: list[int], in_use: bool, expected: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    with random_states_kept(gpus):
        seed_all(1)
    assert restored == expected


def test_a_model_that_is_found_leaves_the_states_of_all_gpus(
    restored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    find_workload("mobilenet_v3_small", batch_size=1, image_size=32)
    assert restored == [0, 1, 2]


def test_the_states_of_python_numpy_and_torch_are_given_back() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with random_states_kept():
        seed_all(1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
