"""FP8 operands and their products. `mezzo.amp` decides which products are FP8."""

from mezzo.fp8._gathered import GatheredWeight, warn_of_half_use
from mezzo.fp8._gathering import gather_in_fp8
from mezzo.fp8._linear import FP8_LINEAR, FP8_LINEAR_BACKWARD, fp8_linear
from mezzo.fp8._numbers import E4M3, E5M2, FORMATS, LARGEST, amax_of, round_to, scale_for
from mezzo.fp8._operands import AmaxHistory, Operand, make_operand
from mezzo.fp8._parts import (
    count_without_history,
    fp8_written_by_producers,
    share_delayed_operands,
    show_parts_to_inductor,
)
from mezzo.fp8._product import LEAST_CAPABILITY, multiply, recipe_for, refuse_without_fp8, why_no_fp8
from mezzo.fp8._recipe import MULTIPLE, Fp8Recipe, recipe_from_text, recipe_to_text
from mezzo.fp8._weights import (
    AMAX,
    HEADROOM,
    INVERSE,
    NEWEST,
    UNKNOWN_AMAX,
    WeightCopies,
    capture_with_managed_copies,
    copies_for_update,
    copies_of,
    count_of_copies,
    drop_copies,
    histories_of,
    keep_copies,
    renew_copies,
)

__all__ = [
    "Fp8Recipe",
    "MULTIPLE",
    "recipe_to_text",
    "recipe_from_text",
    "fp8_linear",
    "FP8_LINEAR",
    "FP8_LINEAR_BACKWARD",
    "show_parts_to_inductor",
    "share_delayed_operands",
    "count_without_history",
    "fp8_written_by_producers",
    "E4M3",
    "E5M2",
    "FORMATS",
    "LARGEST",
    "amax_of",
    "scale_for",
    "round_to",
    "AmaxHistory",
    "Operand",
    "make_operand",
    "multiply",
    "why_no_fp8",
    "LEAST_CAPABILITY",
    "recipe_for",
    "refuse_without_fp8",
    "HEADROOM",
    "WeightCopies",
    "copies_of",
    "histories_of",
    "keep_copies",
    "renew_copies",
    "drop_copies",
    "copies_for_update",
    "count_of_copies",
    "capture_with_managed_copies",
    "UNKNOWN_AMAX",
    "INVERSE",
    "AMAX",
    "NEWEST",
    "GatheredWeight",
    "gather_in_fp8",
    "warn_of_half_use",
]
