"""Layouts: which line of a text holds which field, one table per form of text. Lines count from 0, as in the scripts."""

from collections.abc import Mapping
from types import MappingProxyType


def _number(names: str, start: int = 1) -> dict[str, int]:
    """Number names from `start`; a dot is a line without a field."""
    return {name: place for place, name in enumerate(names.split(), start) if name != "."}


_HEAD = "model_name python gpu_list use_gpu autocast epoch save batch pretrain train_model train_img param1"
_TRAINERS = "trainer norm pact fpgm distill key1 key2"
_EXPORTS = "norm_export pact_export fpgm_export distill_export export1 export2"
_MATRIX = "i_gpu i_mkldnn i_threads i_batch i_trt i_prec i_model"
_INFER = f"infer_model infer_export infer_quant inference {_MATRIX} i_img i_savelog i_bench i1"

_STANDARD = {
    **_number(f"{_HEAD} . {_TRAINERS} . . eval eval1"),
    **_number(f"save_infer weight {_EXPORTS} infer_dir {_INFER}", 27),
}
LAYOUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "standard-51": _STANDARD,
        "seg-52": {**_STANDARD, "i2": 51},
        "tutorial-32": _number(
            "model_name python gpu_list use_gpu epoch save batch pretrain train_model data . trainer norm . . eval . ."
            " save_infer weight norm_export . infer_model infer_export . inference i_gpu i_batch i_model i_img i_bench"
        ),
        "rs-53": {
            **_number(
                "model_name python gpu_list use_gpu autocast epoch save batch pretrain config train_model param1"
                f" . {_TRAINERS} . . eval eval1"
            ),
            **_number(
                f"save_infer weight shape {_EXPORTS} infer_dir infer_model infer_export infer_quant inference"
                f" {_MATRIX} i_config i_savelog i_bench i1 i2",
                27,
            ),
        },
        "panoptic-55": {
            **_number(
                "model_name python gpu_list use_gpu autocast epoch save batch pretrain config train_model train_img param1"
                f" . {_TRAINERS} . . eval eval1"
            ),
            **_number(
                f"save_infer weight shape xconfig {_EXPORTS} . infer_model {_MATRIX} i_img"
                " i_savelog i_bench inference infer_export infer_quant i1 i2",
                28,
            ),
        },
        "passl": {
            **_number(f"{_HEAD} . {_TRAINERS} . . extract extract1 extract2 . . linear linear1 linear2"),
            **_number(f"save_infer weight {_EXPORTS} . {_INFER}", 33),
        },
        "kl-20": _number(
            f"model_name python weight save_infer infer_model infer_export infer_quant inference {_MATRIX} i_img"
        ),
        "supplementary": _number(
            "model_name python gpu_list use_gpu autocast epoch save batch pretrain checkpoints list1 list2 list3 norm"
        ),
    }
)
