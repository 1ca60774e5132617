"""The default lists, by level, and lists read from a file.

The white list holds operators that compute in half, the black list those that compute in float32. The lists are those
of the AMP documents, carried over to torch operators. They are versioned here and do not follow torch's own autocast
lists, which differ between CUDA and CPU and between releases.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzo.amp import _ops as ops
from mezzo.amp._exclude import exclude_layers, find_excluded
from mezzo.amp._names import check_disjoint, resolve_list
from mezzo.dtypes import HALF_DTYPES, HALF_NAMES, LEVELS, dtype_name
from mezzo.errors import MezzoError
from mezzo.files import MiB, read_json, read_yaml, short_repr

LISTS_VERSION = 2


class ListsError(MezzoError, ValueError):
    """A file of lists is unusable."""


_WHITE = frozenset({"einsum"}) | ops.variants_of(
    [*ops.MATRIX_PRODUCTS, *ops.CONVOLUTIONS, *ops.ATTENTION, *ops.RECURRENT, *ops.INDEXED_MAX_POOLING]
)
_WHITE_BY_DTYPE = {
    torch.float16: _WHITE | ops.variants_of(ops.FAKE_QUANTISATION),
    torch.bfloat16: _WHITE,
}
_LOSS = ops.variants_of(ops.LOSSES)
_GRIDS = ops.variants_of(ops.GRIDS)
_BLACK_O1 = _LOSS | _GRIDS | frozenset({"pow.scalar", "logsumexp.full", "logsumexp.dim"}) | ops.variants_of(
    [
        *ops.SENSITIVE_POINTWISE,
        *ops.SUMS,
        *ops.NORMS,
        *ops.SCANS,
        *ops.DISTANCES,
        *ops.AFFINE_NORMS,
        *ops.SOFTMAXES,
        *ops.EMBEDDINGS,
        *ops.SCATTERING,
    ]
)  # fmt: skip
_REDUCTIONS = ops.variants_of([*ops.SUMS, *ops.NORMS])
_BLACK_O2 = _LOSS | _GRIDS | frozenset(v for v in _REDUCTIONS if v.endswith(".full"))
_INSIDE_O1 = ops.variants_of([*ops.UPSAMPLING, *ops.GRID_SAMPLING])
_INSIDE_O2 = (
    _INSIDE_O1
    | ops.variants_of([*ops.SOFTMAXES, *ops.AFFINE_NORMS])
    | frozenset({"cumsum", "cosine_similarity"})
    | frozenset(v for v in _REDUCTIONS | ops.variants_of(ops.OTHER_REDUCTIONS) if v.endswith(".dim"))
)

_NOTHING: frozenset[str] = frozenset()
_BLACK = {"O0": _NOTHING, "OD": _NOTHING, "O1": _BLACK_O1, "O2": _BLACK_O2, "O3": _BLACK_O2}
_INSIDE = {"O0": _NOTHING, "OD": _NOTHING, "O1": _INSIDE_O1, "O2": _INSIDE_O2, "O3": _INSIDE_O2}


def default_white(level: str, dtype: torch.dtype) -> frozenset[str]:
    """Return the variants that compute in half at a level."""
    return _NOTHING if level == "O0" else _WHITE_BY_DTYPE[dtype]


def default_black(level: str) -> frozenset[str]:
    """Return the variants that compute and return float32 at a level."""
    return _BLACK[level]


def default_inside(level: str) -> frozenset[str]:
    """Return the variants that compute in float32 but return half at a level, so that later operators stay half."""
    return _INSIDE[level]


def white_list() -> dict[str, dict[str, set[str]]]:
    """Return the default white lists as `[dtype][level] -> set` of operator variants.

    >>> "conv2d" in white_list()["float16"]["O1"]
    True
    """
    return {dtype_name(half): {level: set(default_white(level, half)) for level in LEVELS} for half in HALF_DTYPES}


def black_list() -> dict[str, dict[str, set[str]]]:
    """Return the default black lists as `[dtype][level] -> set` of operator variants.

    >>> black_list()["bfloat16"]["OD"]
    set()
    """
    return {name: {level: set(default_black(level)) for level in LEVELS} for name in HALF_NAMES}


_OPERATOR_KEYS = ("custom_white_list", "custom_black_list")
LAYER_KEYS = ("excluded_layers", "half_layers")


def read_lists(path: str | Path, model: nn.Module | None = None) -> dict[str, list[str]]:
    """Read `custom_white_list` and `custom_black_list` from a YAML or JSON file, as keywords for `auto_cast`.

    Args:
        path: The file; its keys and names are checked.
        model: The model that the file's `excluded_layers` (see `exclude_layers`) and `half_layers` (see `keep_in_half`)
            are applied to, before or after `decorate`.

    Raises:
        ValueError: The file cannot be read, holds unknown keys or names, or names modules while `model` is None.

    >>> auto_cast(**read_lists("lists.yml", model=net))  # doctest: +SKIP
    """
    from mezzo.amp._fp8 import keep_in_half  # imports policies, which import this file

    lists = load_lists(path)
    named = {key: names for key in LAYER_KEYS if (names := lists.pop(key, []))}
    if named and model is None:
        held = " and ".join(named)
        raise ValueError(f"{path}: has {held}, which name modules of a model: call read_lists(path, model=...)")
    if named and model is not None:
        try:
            found = {key: find_excluded(model, named.get(key), key) for key in LAYER_KEYS}
            exclude_layers(model, found["excluded_layers"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        keep_in_half(model, found["half_layers"])
    return lists


def load_lists(path: str | Path) -> dict[str, list[str]]:
    """Return the content of a list file. Operator names are checked; module names are not, for lack of a model."""
    path = Path(path)
    read = read_json if path.suffix == ".json" else read_yaml
    data: Any = read(path, limit=MiB, raising=ListsError)
    if not isinstance(data, dict) or not data.keys() <= {*_OPERATOR_KEYS, *LAYER_KEYS}:
        found = short_repr(sorted(data)) if isinstance(data, dict) else type(data).__name__
        keys = f"{', '.join((*_OPERATOR_KEYS, *LAYER_KEYS[:-1]))} and {LAYER_KEYS[-1]}"
        raise ListsError(f"{path}: holds {found}; allowed are the keys {keys}")
    for key, names in data.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ListsError(f"{path}: {key} must be a list of {'module' if key in LAYER_KEYS else 'operator'} names")
    try:
        check_disjoint(*(resolve_list(data.get(key), key) for key in _OPERATOR_KEYS))
    except ValueError as error:
        raise ListsError(f"{path}: {error}") from error
    return data
