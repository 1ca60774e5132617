import math

import pytest
import torch

from mezzo.bench import ModelError, find_workload


@pytest.mark.parametrize(
    ("name", "labels"),
    [("mobilenet_v3_small", (2,)), ("pp_humanseg_lite", (2, 64, 64)), ("pp_liteseg_stdc1", (2, 64, 64))],
)
def test_name_of_the_registry_gives_a_network_and_a_batch_that_it_trains_on(name, labels):
    workload = find_workload(name, 2)
    assert workload.inputs.shape == (2, 3, 64, 64)
    assert workload.targets.shape == labels
    loss = workload.loss_fn(workload.model.train()(workload.inputs), workload.targets)
    loss.backward()
    assert math.isfinite(loss.item())


def test_heads_count_equally():
    workload = find_workload("pp_liteseg_stdc1", 1)
    first, second = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, math.log(5.0)]])
    expected = (math.log(4) + math.log(8)) / 2  # uniform over 4; and 1 / (3 + 5) for label 0
    assert workload.loss_fn((first, second), torch.tensor([0])).item() == pytest.approx(expected)


def test_file_and_factory_give_the_users_own_model_and_the_same_numbers_each_time(tmp_path):
    (tmp_path / "net.py").write_text("from torch import nn\ndef build(): return nn.Linear(3, 5)\n")
    before = torch.get_rng_state()
    first, second = (find_workload(f"{tmp_path / 'net.py'}:build", 4) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.model.weight, second.model.weight)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state is his own"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mobilenet_v3_smal", "unknown model 'mobilenet_v3_smal'; did you mean 'mobilenet_v3_small'?"),
        ("resnet", "for a model of your own give FILE:FACTORY, such as net.py:build_model"),
        ("net.py", r"^'net.py': must be FILE:FACTORY, such as net.py:build_model$"),
        ("absent.py:build", r"^'absent.py:build': there is no file 'absent.py'"),
    ],
)
def test_reference_to_nothing_says_what_a_reference_is(reference, message):
    with pytest.raises(ModelError, match=message):
        find_workload(reference, 2)


@pytest.mark.parametrize("numbers", [(0, 64), (2, 0)])
def test_batch_and_image_have_a_size(numbers):
    with pytest.raises(ValueError, match=r"(batch|image)_size=0: must be at least 1"):
        find_workload("mobilenet_v3_small", *numbers)
