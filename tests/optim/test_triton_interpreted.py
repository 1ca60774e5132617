"""The Triton tier without a GPU: its tests, run by Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest

from triton_interpreter import run_interpreted

TESTS = Path(__file__).with_name("test_triton_step.py")
PLANS = Path(__file__).with_name("test_triton_plans.py")
COMPACT = Path(__file__).with_name("test_compact_step.py")
HALF_STATE = Path(__file__).with_name("test_half_state_step.py")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
def test_adamw_of_the_triton_tier_equals_its_formula_in_the_interpreter() -> None:
    run_interpreted(f"{TESTS}::test_updates_are_those_of_the_formula_operation_by_operation[adamw-half0]")


@pytest.mark.slow
def test_all_tests_of_the_triton_tier_pass_in_its_interpreter() -> None:
    run_interpreted(str(TESTS), str(PLANS), str(COMPACT), str(HALF_STATE))


def test_compact_masters_are_split_by_triton_as_by_torch() -> None:
    run_interpreted(f"{COMPACT}::test_numbers_of_every_kind_are_split_as_torch_splits_them[half0]", builds_all=False)


def test_bfloat16_state_is_rounded_by_triton_as_by_torch() -> None:
    run_interpreted(f"{HALF_STATE}::test_state_is_rounded_as_by_torch[adamw-True]", builds_all=False)
