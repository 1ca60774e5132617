"""Keys, shapes, counts and multiply-accumulates of all nine networks; names and types."""

import json

import pytest
import torch
from reference import ZOO, paddle_layout, torch_key
from torch import nn

from mezzo.cli import run
from mezzo.vision.models import (
    count_macs,
    count_parameters,
    create_from_types,
    create_model,
    list_models,
    model_info,
    summarize,
)

MODELS = json.loads((ZOO / "models.json").read_text())


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, **options)


def test_there_are_nine() -> None:
    assert list_models() == sorted(MODELS)
    assert list_models("pp_*") == [name for name in sorted(MODELS) if name.startswith("pp_")]


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_shapes_are_the_published_ones(name: str) -> None:
    file = ZOO / f"{name}.json"
    stored = json.loads((file if file.exists() else ZOO / f"keys_{name}.json").read_text())
    keys = stored["keys"] if isinstance(stored, dict) else stored
    model = on_meta(name)
    own = {k: tuple(v.shape) for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert own == {torch_key(key): tuple(reversed(shape)) if len(shape) == 2 else tuple(shape) for key, shape in keys}
    assert paddle_layout(torch.zeros(2, 3).numpy()).shape == (3, 2)


@pytest.mark.parametrize("name", MODELS)
def test_counts_and_macs_are_the_published_ones(name: str) -> None:
    counts = MODELS[name]["counts"]
    model = on_meta(name)
    assert count_parameters(model) == counts["trainable"]
    state = [v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")]
    assert (len(state), sum(v.numel() for v in state)) == (counts["state_dict_tensors"], counts["state_dict_numbers"])
    for size, macs in MODELS[name]["macs"].items():
        height, width = map(int, size.split("x"))
        assert count_macs(model, height, width) == macs["total_macs"]


@pytest.mark.parametrize("name", MODELS)
def test_only_the_heads_depend_on_the_number_of_classes(name: str) -> None:
    one, other = on_meta(name).state_dict(), on_meta(name, num_classes=7).state_dict()
    differing = [key for key in one if one[key].shape != other[key].shape]
    assert differing
    heads = model_info(name).head_keys
    assert all(key.startswith(heads) for key in differing)
    assert all(any(key.startswith(head) for key in differing) for head in heads)


def test_batch_norms_are_torchs_own_and_mobilenets_have_the_intended_momentum() -> None:
    for name in MODELS:
        norms = [part for part in on_meta(name).modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        assert {type(part) for part in norms} == {nn.BatchNorm2d}
        expected = {(1e-3, 0.01)} if name == "mobilenet_v3_small" else {(1e-5, 0.1)}
        assert {(part.eps, part.momentum) for part in norms} == expected


TYPES = {
    "pp_liteseg_stdc1": {
        "type": "PPLiteSeg",
        "num_classes": 19,
        "backbone": {"type": "STDC1", "pretrained": None},
        "arm_out_chs": [32, 64, 128],
        "seg_head_inter_chs": [32, 64, 64],
    },
    "pp_liteseg_stdc2": {"type": "PPLiteSeg", "backbone": "STDC2", "backbone_indices": (2, 3, 4)},
    "pp_humanseg_lite": {"type": "PPHumanSegLite", "num_classes": 2, "align_corners": False},
    "pp_humanseg_mobile": {"type": "FCN", "num_classes": 2, "backbone": {"type": "HRNet_W18_Small_V1"}},
    "fcn_hrnet_w18": {
        "type": "FCN",
        "num_classes": 19,
        "bias": False,
        "backbone": {"type": "HRNet_W18", "padding_same": False, "align_corners": False},
        "backbone_indices": [-1],
    },
    "ocrnet_hrnetw18": {
        "type": "OCRNet",
        "num_classes": 19,
        "backbone": {"type": "HRNet_W18"},
        "backbone_indices": [0],
    },
    "ocrnet_hrnetw48": {"type": "OCRNet", "num_classes": 19, "backbone": {"type": "HRNet_W48"}},
    "pp_humanseg_server": {
        "type": "DeepLabV3P",
        "num_classes": 2,
        "backbone": {"type": "ResNet50_vd", "output_stride": 8, "multi_grid": [1, 2, 4]},
        "backbone_indices": [0, 3],
        "aspp_ratios": [1, 12, 24, 36],
        "aspp_out_channels": 256,
        "align_corners": False,
        "pretrained": None,
    },
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_the_configurations_make_the_same_networks(name: str) -> None:
    with torch.device("meta"):
        made = create_from_types(TYPES[name])
    own = on_meta(name)
    assert {k: v.shape for k, v in made.state_dict().items()} == {k: v.shape for k, v in own.state_dict().items()}
    convs = [[(c.stride, c.padding, c.dilation) for c in m.modules() if isinstance(c, nn.Conv2d)] for m in (made, own)]
    assert convs[0] == convs[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "PPLiteSegg"}, "unknown model type 'PPLiteSegg'; did you mean 'PPLiteSeg'"),
        ({"type": "FCN", "num_classes": 2}, "FCN: needs a backbone: HRNet_W18, HRNet_W18_Small_V1, HRNet_W48"),
        ({"type": "FCN", "num_classes": 2, "backbone": "STDC1"}, "unknown backbone of FCN 'STDC1'"),
        (
            {"type": "FCN", "num_classes": 2, "backbone": "HRNet_W18", "biass": 1},
            "unknown option of FCN 'biass'; did you",
        ),
        (
            {"type": "OCRNet", "backbone": "HRNet_W18", "align_corners": True},
            "align_corners=True: only False",
        ),
        (
            {"type": "PPHumanSegLite", "pretrained": "http://x"},
            "pretrained: load weights with mezzo.checkpoint.load_weights",
        ),
        (
            {"type": "PPLiteSeg", "backbone": "STDC1", "arm_type": "UAFM_ChAtten"},
            "PPLiteSeg: arm_type='UAFM_ChAtten': only 'UAFM_SpAtten'",
        ),
        (
            {"type": "PPLiteSeg", "backbone": "STDC1", "seg_head_mid_chs": [8] * 3, "seg_head_inter_chs": [8] * 3},
            "PPLiteSeg: seg_head_inter_chs is also given under another name",
        ),
        (
            {"type": "PPLiteSeg", "backbone": "STDC1", "seg_head_mid_chs": None},
            "PPLiteSeg: seg_head_mid_chs has no value",
        ),
        (
            {"type": "DeepLabV3P", "backbone": "ResNet50_vd"},
            r"ResNet50_vd: multi_grid is missing",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_from_types(config)


def test_names_of_early_configurations_make_the_same_network() -> None:
    early = {"arm_type": "ARM_Add_SpAttenAdd3", "arm_out_chs": [32, 64, 128], "seg_head_mid_chs": [32, 64, 64]}
    with torch.device("meta"):
        made = create_from_types({"type": "PPLiteSeg", "num_classes": 19, "backbone": "STDC1", **early})
    own = on_meta("pp_liteseg_stdc1")
    assert {k: v.shape for k, v in made.state_dict().items()} == {k: v.shape for k, v in own.state_dict().items()}


def test_rates_that_are_not_written_are_those_of_paddleseg() -> None:
    backbone = {"type": "ResNet50_vd", "multi_grid": [1, 2, 4]}
    with torch.device("meta"):
        made = create_from_types({"type": "DeepLabV3P", "num_classes": 2, "backbone": backbone})
    dilations = [c.dilation[0] for c in made.head.aspp.modules() if isinstance(c, nn.Conv2d) and c.groups > 1]
    assert dilations == [6, 12, 18]


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown model 'mobilenet_v3_smal'; did you mean 'mobilenet_v3_small'"):
        create_model("mobilenet_v3_smal")
    assert create_model("PPHumanSegLite", num_classes=2, align_corners=False).model_name == "pp_humanseg_lite"
    assert type(on_meta("PPLiteSeg", backbone="STDC2")).__name__ == "PPLiteSeg"


@pytest.mark.slow
def test_the_list_has_a_line_a_network(capsys: pytest.CaptureFixture) -> None:
    assert run(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert "| ocrnet_hrnetw48    | segmentation   | 70,374,982 | 324.4744 | 512x1024 | 19      | 2     |" in lines


def test_patterns_choose_and_json_is_data(capsys: pytest.CaptureFixture) -> None:
    assert run(["models", "pp_humanseg_*", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in data] == list_models("pp_humanseg_*")
    assert data[0]["parameters"] == 226_806
    assert run(["models", "mobilenet_v3_small"]) == 0
    assert (
        "| mobilenet_v3_small | classification | 2,542,856  | 0.0565 | 224x224 | 1000    | 1     |"
        in capsys.readouterr().out
    )


def test_a_summary_adds_up(capsys: pytest.CaptureFixture) -> None:
    rows = summarize("mobilenet_v3_small")
    assert sum(row.macs for row in rows) == MODELS["mobilenet_v3_small"]["macs"]["224x224"]["total_macs"]
    assert sum(row.parameters for row in rows) == 2_542_856
    assert run(["models", "mobilenet_v3_small", "--summary"]) == 0
    out = capsys.readouterr().out
    assert "| features.0.0 " in out
    assert "1x16x112x112" in out
    assert run(["models", "mobilenet_v3_small", "--summary", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["path"] == "features.0.0"
    assert run(["models", "mobilenet"]) == 2
    assert "unknown model 'mobilenet'" in capsys.readouterr().err
