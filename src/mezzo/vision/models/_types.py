"""Networks as PaddleSeg's configurations describe them: a type, a backbone with a type, and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mezzo._arguments import check_integer
from mezzo.errors import unknown_choice
from mezzo.vision.models._registry import tag_model
from mezzo.vision.models.deeplabv3p import DeepLabV3P, resnet50_vd
from mezzo.vision.models.hrnet import FCN, hrnet_w18, hrnet_w18_small_v1, hrnet_w48
from mezzo.vision.models.ocrnet import OCRNet
from mezzo.vision.models.pp_humanseg_lite import PPHumanSegLite
from mezzo.vision.models.pp_liteseg import PPLiteSeg, stdc1, stdc2

#: Options that are supported with one value only.
_FIXED: dict[str, dict[str, Any]] = {
    "PPLiteSeg": {"backbone_indices": [2, 3, 4], "arm_type": "UAFM_SpAtten", "resize_mode": "bilinear"},
    "FCN": {"backbone_indices": [-1]},
    "OCRNet": {"backbone_indices": [0]},
    "DeepLabV3P": {"backbone_indices": [0, 3], "aspp_out_channels": 256},
    "ResNet50_vd": {"multi_grid": [1, 2, 4]},
}
#: Older names of supported values.
_SYNONYMS = {"ARM_Add_SpAttenAdd3": "UAFM_SpAtten"}
#: Fixed options that must be written, with the default of PaddleSeg, which is not supported.
_NEEDED = {"ResNet50_vd": {"multi_grid": [1, 1, 1]}}
#: Defaults of PaddleSeg that differ from those of our networks.
_DEFAULTS: dict[str, dict[str, Any]] = {"DeepLabV3P": {"aspp_ratios": [1, 6, 12, 18]}}
_RENAMED: dict[str, dict[str, str]] = {
    "PPLiteSeg": {
        "arm_out_chs": "arm_channels",
        "seg_head_inter_chs": "head_channels",
        "seg_head_mid_chs": "head_channels",  # its name in early configurations
        "cm_out_ch": "context_channels",
        "cm_bin_sizes": "bins",
    },
    "FCN": {"bias": "bias"},
    "OCRNet": {"ocr_mid_channels": "mid_channels", "ocr_key_channels": "key_channels"},
    "DeepLabV3P": {"aspp_ratios": "rates"},
    "ResNet50_vd": {"output_stride": "output_stride"},
}
_BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "STDC1": stdc1,
    "STDC2": stdc2,
    "HRNet_W18": hrnet_w18,
    "HRNet_W18_Small_V1": hrnet_w18_small_v1,
    "HRNet_W48": hrnet_w48,
    "ResNet50_vd": resnet50_vd,
}
_MODELS: dict[str, Callable[..., nn.Module]] = {
    "PPLiteSeg": PPLiteSeg,
    "PPHumanSegLite": PPHumanSegLite,
    "FCN": FCN,
    "OCRNet": OCRNet,
    "DeepLabV3P": DeepLabV3P,
}
MODEL_TYPES = tuple(_MODELS)
BACKBONE_TYPES = tuple(_BACKBONES)
_BACKBONE_PREFIX = {"PPLiteSeg": "STDC", "FCN": "HRNet", "OCRNet": "HRNet", "DeepLabV3P": "ResNet"}
#: A network of the registry with the same head parameters.
LIKE = {
    "PPLiteSeg": "pp_liteseg_stdc1",
    "PPHumanSegLite": "pp_humanseg_lite",
    "FCN": "fcn_hrnet_w18",
    "OCRNet": "ocrnet_hrnetw18",
    "DeepLabV3P": "pp_humanseg_server",
}


def create_from_types(config: Mapping[str, Any]) -> nn.Module:
    """Return the network of a `model:` block of a PaddleSeg configuration.

    Args:
        config: `type`, `num_classes`, `backbone` (a type name or a block with `type`), and options under PaddleSeg's names.

    Raises:
        ValueError: A type or an option is unknown, or has a value that is not supported; the message names it.
    """
    options = dict(config)
    name = options.pop("type", None)
    if not isinstance(name, str) or name not in _MODELS:
        raise ValueError(unknown_choice("model type", name, MODEL_TYPES))
    check_integer(f"{name}: num_classes", options.get("num_classes", 1), at_least=1)
    _refuse_weights(options, name)
    arguments: dict[str, Any] = {"num_classes": options.pop("num_classes")} if "num_classes" in options else {}
    if name in _BACKBONE_PREFIX:
        if "backbone" not in options:
            raise ValueError(f"{name}: needs a backbone: {', '.join(_backbones_for(name))}")
        arguments["backbone"] = _create_backbone(options.pop("backbone"), name)
        arguments.setdefault("num_classes", 19)
    return tag_model(_MODELS[name](**arguments, **_translate(name, options)), LIKE[name])


def _create_backbone(given: Any, model: str) -> nn.Module:
    options = {"type": given} if not isinstance(given, Mapping) else dict(given)
    name = options.pop("type", None)
    if not isinstance(name, str) or name not in _backbones_for(model):
        raise ValueError(unknown_choice(f"backbone of {model}", name, _backbones_for(model)))
    _refuse_weights(options, name)
    arguments: dict[str, Any] = {}
    if "padding_same" in options and name.startswith("HRNet"):
        arguments["padding"] = "same" if options.pop("padding_same") else 1
    return _BACKBONES[name](**arguments, **_translate(name, options))


def _backbones_for(model: str) -> tuple[str, ...]:
    return tuple(name for name in BACKBONE_TYPES if name.startswith(_BACKBONE_PREFIX[model]))


def _refuse_weights(options: dict[str, Any], name: str) -> None:
    if options.pop("pretrained", None) is not None:
        raise ValueError(
            f"{name}: pretrained: load weights with mezzo.checkpoint.load_weights after creating the model"
        )


def _translate(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names that our networks use."""
    renamed, fixed = _RENAMED.get(name, {}), {**_FIXED.get(name, {}), "align_corners": False}
    found: dict[str, Any] = {}
    for key, given in {**_DEFAULTS.get(name, {}), **options}.items():
        value = _plain(given)
        if key in renamed:
            _check_renamed(name, key, value, is_taken=renamed[key] in found)
            found[renamed[key]] = value
        elif key not in fixed:
            raise ValueError(unknown_choice(f"option of {name}", key, (*renamed, *fixed)))
        elif value != fixed[key]:
            raise ValueError(f"{name}: {key}={value!r}: only {fixed[key]!r} is supported")
    for key, without in _NEEDED.get(name, {}).items():
        if key not in options:
            raise ValueError(
                f"{name}: {key} is missing: its default {without!r} is not supported; write {fixed[key]!r}"
            )
    if "rates" in found:
        found["rates"] = [rate for rate in found["rates"] if rate != 1]  # the first block of the pyramid is always 1x1
    return found


def _plain(value: Any) -> Any:
    """Return a tuple as a list, and an old name as the new one."""
    if isinstance(value, tuple):
        return list(value)
    return _SYNONYMS.get(value, value) if isinstance(value, str) else value


def _check_renamed(name: str, key: str, value: object, *, is_taken: bool) -> None:
    if value is None:
        raise ValueError(f"{name}: {key} has no value")
    if is_taken:
        raise ValueError(f"{name}: {key} is also given under another name; remove one of them")
