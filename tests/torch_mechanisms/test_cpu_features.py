"""The CPU is asked, by whichever function this torch has."""

import torch

from mezzo._torch.cpu_features import onednn_computes_bfloat16


def test_one_of_the_questions_is_known_to_this_torch() -> None:
    names = ("_is_avx512_supported", "_is_amx_tile_supported")
    has_probe = hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") or any(hasattr(torch.cpu, n) for n in names)
    assert has_probe or not torch.backends.mkldnn.is_available(), "torch asks the CPU by another name now"
    assert onednn_computes_bfloat16() in (True, False)
