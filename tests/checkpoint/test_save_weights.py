"""Weights beside a checkpoint are read back by `load_weights`, with all bits."""

import pytest
import safetensors.torch
import torch
from torch import nn

from mezzo.amp import decorate
from mezzo.checkpoint import load_weights, save_weights
from mezzo.errors import RunError
from mezzo.vision.models import create_model


def other() -> nn.Module:
    torch.manual_seed(1)
    return create_model("pp_humanseg_lite", num_classes=2)


@pytest.mark.parametrize("file", ["model.safetensors", "model.pdparams"])
def test_a_network_of_the_nine_is_written_in_both_formats(tmp_path, file):
    model = create_model("pp_humanseg_lite", num_classes=2)
    save_weights(tmp_path, model)
    loaded = other()
    load_weights(loaded, tmp_path / file)
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert name.endswith("num_batches_tracked") or torch.equal(value, expected[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pdparams", "model.safetensors"]


def test_a_decorated_model_is_written_with_its_masters(tmp_path):
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    exact = model[0].weight.detach().clone()
    decorate(model, level="O2")
    assert model[0].weight.dtype is torch.float16
    save_weights(tmp_path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["0.weight"], exact)
    assert written["1.num_batches_tracked"].dtype is torch.int64


def test_half_and_tied_weights_are_written_as_float32(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()
    model[1].weight = model[0].weight
    save_weights(tmp_path, model)
    written = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.float32}
    assert torch.equal(written["1.weight"], model[0].weight.float())


def test_a_place_where_nothing_can_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/model\.safetensors: cannot be written: File exists"):
        save_weights(tmp_path / "file", nn.Linear(1, 1))
