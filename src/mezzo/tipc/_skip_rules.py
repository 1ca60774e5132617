"""Combinations of inference settings that the scripts skip, and why. Values are compared as words, as in the scripts."""

from collections.abc import Callable, Mapping

Chosen = Mapping[str, str]


def _is_low_precision(word: str) -> bool:
    return "fp16" in word or "int8" in word


RULES: Mapping[str, tuple[Callable[[Chosen, str], bool], str]] = {
    "quant_nomkl": (lambda c, q: c["mkldnn"] == "False" and q == "True", "a quantised model needs oneDNN"),
    "fp16_nomkl": (lambda c, q: c["mkldnn"] == "False" and c["prec"] == "fp16", "float16 needs oneDNN"),
    "quant_int8": (lambda c, q: q == "True" and c["prec"] not in ("", "int8"), "a quantised model runs in int8 only"),
    "nq_fp32": (
        lambda c, q: q == "False" and c["prec"] not in ("", "fp32"),
        "a model that is not quantised runs in fp32 only",
    ),
    "mkl_required": (lambda c, q: c["mkldnn"] == "False", "only oneDNN is tested"),
    "nq_int8": (lambda c, q: q == "False" and "int8" in c["prec"], "int8 needs a quantised model"),
    "low_notrt": (lambda c, q: _is_low_precision(c["prec"]) and c["trt"] == "False", "fp16 and int8 need TensorRT"),
    "q_strict": (
        lambda c, q: q == "True" and (c["trt"] == "False" or "int8" in c["prec"]),
        "the script's rule for quantised models, which never lets one run in int8 on a GPU",
    ),
    "true_notrt": (lambda c, q: c["prec"] == "True" and c["trt"] == "False", "float16 needs TensorRT"),
    "fp16_notrt": (lambda c, q: c["prec"] == "fp16" and c["trt"] == "False", "float16 needs TensorRT"),
    "det": (
        lambda c, q: (
            c["prec"] != "paddle"
            and ((q == "False" and c["prec"] == "trt_int8") or (q == "True" and c["prec"] != "trt_int8"))
        ),
        "trt_int8 needs a quantised model, and a quantised model needs trt_int8",
    ),
}


def skip_reason(rules: tuple[str, ...], chosen: Chosen, quantised: str) -> str:
    """Return why a combination is skipped; empty if it is run."""
    for name in rules:
        applies, reason = RULES[name]
        if applies(chosen, quantised):
            return reason
    return ""
