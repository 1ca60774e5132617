"""Networks by name, with the weights that others published."""

from mezzo.files import UnsafePickle
from mezzo.models import deeplabv3p, hrnet, losses, mobilenet_v3, ocrnet, pp_humanseg_lite, pp_liteseg
from mezzo.models._create import create_model
from mezzo.models._inspect import LayerRow, count_macs, count_parameters, describe, summarize
from mezzo.models._registry import ModelInfo, list_models, model_info, names_and_aliases
from mezzo.models._trained import count_classes, load_trained
from mezzo.models._types import create_from_types
from mezzo.models.weights import (
    LoadReport,
    WeightsError,
    convert,
    load_paddle_state,
    load_pdparams,
    load_weights,
    paddle_state,
    read_pdparams,
    save_pdparams,
)

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
    "load_weights",
    "load_trained",
    "count_classes",
    "load_pdparams",
    "load_paddle_state",
    "save_pdparams",
    "paddle_state",
    "read_pdparams",
    "convert",
    "LoadReport",
    "WeightsError",
    "UnsafePickle",
    "losses",
    "mobilenet_v3",
    "pp_liteseg",
    "pp_humanseg_lite",
    "hrnet",
    "ocrnet",
    "deeplabv3p",
]
