"""The argument `amp_configs` of `Model.prepare`: its keys, and their checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from mezzo.amp import GradScaler
from mezzo.dtypes import HALF_NAMES, LEVELS, dtype_name
from mezzo.errors import unknown_choice
from mezzo.precision import Precision

_LEVELS = tuple(level for level in LEVELS if level != "OD")  # Paddle's Model has no OD
_OF_SCALER = (
    "init_loss_scaling", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)  # fmt: skip
_OF_LISTS = ("custom_white_list", "custom_black_list")
_KEYS = ("level", "dtype", "use_promote", "fp8", *_OF_SCALER, *_OF_LISTS)
_ELSEWHERE = {
    "use_pure_fp16": "use level 'O2'",
    "use_fp16_guard": "it belongs to graph mode: mezzo.static.amp.decorate",
    "custom_black_varnames": "it belongs to graph mode: mezzo.static.amp.CustomOpLists; here amp.exclude_layers(network, name) "
    "keeps a layer in float32",
    "enable": "leave amp_configs out, or use level 'O0'",
}


def make_precision_of(amp_configs: str | Mapping[str, Any] | None) -> Precision:
    """Return the precision that `amp_configs` asks for.

    Args:
        amp_configs: None, '' or {}: float32. 'O0', 'O1', 'O2' or 'O3'. Or a dict: `level` (usually
            O1), `dtype` (usually float16; a name or a torch dtype), the settings of `GradScaler`,
            `custom_white_list`, `custom_black_list`, `use_promote` (see `amp.auto_cast`); at O3
            `fp8`, an `amp.Fp8Recipe` or a dict of its settings.

    Raises:
        TypeError: `amp_configs` has another type.
        ValueError: A key is unknown or belongs elsewhere, a value is out of range, or two
            contradict each other.

    >>> make_precision_of("O2").name, make_precision_of({"dtype": "bfloat16"}).name, make_precision_of(None).name
    ('fp16 O2', 'bf16 O1', 'fp32')
    """
    if amp_configs is None:
        return Precision("O0")
    if isinstance(amp_configs, str):
        return make_precision_of({"level": amp_configs} if amp_configs else None)
    if not isinstance(amp_configs, Mapping):
        raise TypeError(
            f"amp_configs is a {type(amp_configs).__name__}: it must be None, a level ({', '.join(_LEVELS)}) or a dict"
        )
    if not amp_configs:
        return Precision("O0")
    _refuse_unknown(amp_configs)
    level, dtype = amp_configs.get("level", "O1"), _dtype_name(amp_configs.get("dtype", "float16"))
    if level not in _LEVELS:
        raise ValueError(f"amp_configs: {unknown_choice('level', level, _LEVELS)}")
    if level == "O0":
        _warn_of_what_is_off([key for key in amp_configs if key != "level"])
        return Precision("O0")
    settings = {key: amp_configs[key] for key in _OF_SCALER if key in amp_configs}
    if settings and dtype == "bfloat16":
        raise ValueError(
            f"amp_configs: {', '.join(settings)} with dtype 'bfloat16': bfloat16 has the range of float32 and needs no loss "
            "scale; remove these settings or the dtype"
        )
    options: dict[str, Any] = {
        key: _names(key, amp_configs[key]) for key in _OF_LISTS if amp_configs.get(key) is not None
    }
    if "use_promote" in amp_configs:
        options["use_promote"] = _switch("use_promote", amp_configs["use_promote"])
    try:
        scaler = GradScaler(enable=dtype == "float16", **settings)
        return Precision(level, dtype, fp8=amp_configs.get("fp8"), scaler=scaler, **options)
    except (ValueError, TypeError) as error:
        raise type(error)(f"amp_configs: {error}") from error


def _dtype_name(dtype: Any) -> str:
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in HALF_NAMES:
        raise ValueError(f"amp_configs: {unknown_choice('dtype', name, HALF_NAMES)}")
    return str(name)


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"amp_configs: {key} is {value!r}: must be True or False")
    return value


def _refuse_unknown(amp_configs: Mapping[str, Any]) -> None:
    for key in amp_configs:
        if key in _ELSEWHERE:
            raise ValueError(f"amp_configs: {key!r} is not a key of amp_configs; {_ELSEWHERE[key]}")
        if key not in _KEYS:
            raise ValueError(f"amp_configs: {unknown_choice('key', key, _KEYS)}")


def _warn_of_what_is_off(keys: list[str]) -> None:
    if keys:
        warnings.warn(f"amp_configs: at level 'O0' {', '.join(keys)} has no effect", UserWarning, stacklevel=4)


def _names(key: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"{key} is {value!r}: must be a set, list or tuple of operator names")
    return list(value)
