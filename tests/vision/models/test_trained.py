"""Weights of a network that is used as it is: they decide the number of classes, and must be complete."""

import pytest
import torch

from mezzo.checkpoint import WeightsError, load_weights, paddle_state, save_pdparams
from mezzo.vision.models import count_classes, create_model, list_models, load_trained


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights of each network, 7 classes."""
    folder = tmp_path_factory.mktemp("weights")
    for name in ("mobilenet_v3_small", "pp_liteseg_stdc1", "pp_humanseg_lite"):
        save_pdparams(create_model(name, num_classes=7), folder / f"{name}.pdparams")
    return folder


@pytest.mark.parametrize("name", list_models())
def test_the_heads_of_every_network_tell_its_classes(name, monkeypatch):
    with torch.device("meta"):
        state = create_model(name, num_classes=7).state_dict()
    monkeypatch.setattr("mezzo.vision.models._trained.read_torch_state", lambda path: state)
    assert count_classes(name, "any.pt") == 7


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "pp_liteseg_stdc1", "pp_humanseg_lite"])
def test_a_file_tells_its_classes_whatever_its_layout(files, name):
    assert count_classes(name, files / f"{name}.pdparams") == 7


def test_weights_of_a_backbone_tell_no_classes_and_are_not_enough(files, tmp_path):
    model = create_model("pp_liteseg_stdc1", num_classes=7)
    save_pdparams(model.backbone, tmp_path / "backbone.pdparams")
    assert count_classes("pp_liteseg_stdc1", tmp_path / "backbone.pdparams") is None
    assert load_weights(model, tmp_path / "backbone.pdparams").loaded  # a training may start from them
    with pytest.raises(WeightsError, match="backbone"):
        load_trained(model, tmp_path / "backbone.pdparams")


def test_weights_for_other_classes_are_refused_where_nothing_trains_them(files):
    path = files / "mobilenet_v3_small.pdparams"
    assert load_weights(create_model("mobilenet_v3_small", num_classes=5), path).heads
    with pytest.raises(WeightsError, match=r"classifier\.3\.weight \(\(1024, 7\), \(1024, 5\)\)"):
        load_trained(create_model("mobilenet_v3_small", num_classes=5), path)


def test_trained_weights_are_loaded(files):
    model = create_model("pp_humanseg_lite", num_classes=7)
    load_trained(model, files / "pp_humanseg_lite.pdparams")
    other = create_model("pp_humanseg_lite", num_classes=7)
    load_weights(other, files / "pp_humanseg_lite.pdparams")
    assert all((paddle_state(model)[key] == value).all() for key, value in paddle_state(other).items())


def test_heads_of_several_sizes_are_refused(monkeypatch):
    state = create_model("pp_liteseg_stdc1", num_classes=7).state_dict()
    state["seg_heads.1.conv_out.weight"] = torch.zeros(9, 64, 1, 1)
    monkeypatch.setattr("mezzo.vision.models._trained.read_torch_state", lambda path: state)
    with pytest.raises(WeightsError, match="7, 9 classes"):
        count_classes("pp_liteseg_stdc1", "any.pt")
