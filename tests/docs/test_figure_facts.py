"""What the figures show is what the code does: the formats of each level, and the rounding of half copies."""

import runpy

import pytest
import torch
from doc_pages import DOCS

from mezzo.amp import Policy

DRAW = runpy.run_path(str(DOCS / "figures" / "draw.py"))


@pytest.mark.parametrize("level", DRAW["CASTS"])
def test_the_network_at_each_level_has_the_formats_that_the_policy_decides(level: str) -> None:
    names = {
        torch.float32: "float32",
        torch.float16: "half",
        None: "float32",
    }  # None at O0: as the input, which is float32
    policy = Policy.create(level)
    dtype = torch.float32
    for operator, (inside, result) in zip(DRAW["NETWORK"], DRAW["CASTS"][level], strict=True):
        decision = policy.decide(operator.replace("entropy", "entropy_loss"), [dtype])
        is_fp8 = inside == "FP8"  # a policy decides half; which of these products are FP8 depends on their layers
        assert (inside, result) == ("FP8" if is_fp8 else names[decision.compute], names[decision.dtype]), operator
        assert not is_fp8 or (level == "O3" and operator == "linear" and decision.compute is torch.float16)
        dtype = decision.dtype or dtype


def test_a_half_copy_of_a_master_moves_as_float16_rounds() -> None:
    for step in range(9):
        master = torch.tensor(1 + step * 2.0**-10 / DRAW["UPDATE_PARTS"], dtype=torch.float64)
        assert (master.half().double().item() - 1) * 2.0**10 == round(step / DRAW["UPDATE_PARTS"])
