"""Logits of the networks against the reference run: evaluation, odd sizes, every head in training."""

import pytest
import torch
from reference import build, error_over_std, images, outputs_of, reference

NAMES = ["mobilenet_v3_small", "pp_liteseg_stdc1", "pp_humanseg_lite", "pp_humanseg_mobile"]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in ("fcn_hrnet_w18", "ocrnet_hrnetw18")]

#: Reachable: 3e-7 for evaluation, 6e-6 at odd sizes (the original computes positions in float32), 4e-7 in training.
FLOAT64 = {"eval": 1e-6, "odd": 1e-5, "train": 1e-6}
#: A few ReLUs flip in float32.
FLOAT32 = {"eval": 2e-5, "odd": 2e-5, "train": 1e-4}


@pytest.mark.parametrize("tag", ["eval", "odd", "train"])
@pytest.mark.parametrize(("dtype", "limits"), [(torch.float64, FLOAT64), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name: str, dtype: torch.dtype, limits: dict[str, float], tag: str) -> None:
    ref = reference(name)
    model = build(name, dtype).train(tag == "train")
    with torch.no_grad():
        outputs = outputs_of(model, images(tag, dtype))
    assert f"{tag}_logits_{len(outputs)}" not in ref.numbers
    for i, logits in enumerate(outputs):
        assert error_over_std(ref, f"{tag}_logits_{i}", logits) < limits[tag]
