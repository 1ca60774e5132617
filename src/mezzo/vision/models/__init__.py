"""Networks by name."""

from mezzo.model.summary import LayerRow
from mezzo.vision.models import deeplabv3p, hrnet, losses, mobilenet_v3, ocrnet, pp_humanseg_lite, pp_liteseg
from mezzo.vision.models._create import create_model
from mezzo.vision.models._inspect import count_macs, count_parameters, describe, summarize
from mezzo.vision.models._registry import ModelInfo, list_models, model_info, names_and_aliases
from mezzo.vision.models._resize import torch_operators_only
from mezzo.vision.models._trained import count_classes, load_trained
from mezzo.vision.models._types import create_from_types

__all__ = [
    "create_model",
    "create_from_types",
    "list_models",
    "model_info",
    "names_and_aliases",
    "ModelInfo",
    "describe",
    "summarize",
    "LayerRow",
    "count_macs",
    "count_parameters",
    "load_trained",
    "count_classes",
    "torch_operators_only",
    "losses",
    "mobilenet_v3",
    "pp_liteseg",
    "pp_humanseg_lite",
    "hrnet",
    "ocrnet",
    "deeplabv3p",
]
