"""The precision that a training command asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mezzo.amp import GradScaler
from mezzo.dtypes import LEVELS, PRECISION_DTYPES
from mezzo.errors import unknown_choice
from mezzo.precision import Precision

#: Operators that the documented segmentation command adds to the lists.
SEGMENTATION_WHITE = ("elementwise_add", "batch_norm")
SEGMENTATION_BLACK = ("bilinear_interp_v2",)
FIRST_LOSS_SCALE = 1024.0  # of both documented training commands


def make_precision(
    precision: str,
    level: str,
    task: Literal["classification", "segmentation"] = "classification",
    lists: Path | None = None,
    fp8: Mapping[str, Any] | None = None,
    use_promote: bool | None = None,
) -> Precision:
    """Return the precision of a command line.

    Args:
        precision: `fp32`, `fp16` or `bf16`.
        level: `O0` (the same as fp32), `OD`, `O1`, `O2` or `O3`.
        task: The documented segmentation command edits the lists; both tasks start at the same loss
            scale.
        lists: A list file (`amp.read_lists`). Where it contradicts the lists of the task, the file
            decides. At fp32 and O0 it has no effect.
        fp8: O3: settings of an `Fp8Recipe`.
        use_promote: O2 and O3: see `auto_cast`; None is its default.

    Raises:
        ValueError: A choice is unknown, or the file is not valid.

    >>> make_precision("fp16", "O2").name, make_precision("fp32", "O1").name
    ('fp16 O2', 'fp32')
    """
    if precision not in PRECISION_DTYPES:
        raise ValueError(unknown_choice("precision", precision, tuple(PRECISION_DTYPES)))
    if level not in LEVELS:
        raise ValueError(unknown_choice("amp_level", level, LEVELS))
    if precision == "fp32" or level == "O0":
        return Precision("O0")
    is_segmentation = task == "segmentation"
    return Precision(
        level,
        PRECISION_DTYPES[precision],
        custom_white_list=SEGMENTATION_WHITE if is_segmentation else None,
        custom_black_list=SEGMENTATION_BLACK if is_segmentation else None,
        lists=lists,
        fp8=fp8,
        use_promote=use_promote,
        scaler=GradScaler(enable=precision == "fp16", init_loss_scaling=FIRST_LOSS_SCALE),
    )
