"""Python kernels replace one another and can be taken out."""

import warnings

import torch

from mezzo._torch.kernel_library import OVERRIDE, remove_kernels


def test_kernels_are_replaced_and_torchs_own_come_back() -> None:
    x, expected = torch.tensor([2.0]), torch.tensor([2.0]).sinh()
    libraries = [torch.library.Library("aten", "IMPL") for _ in range(2)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, library in enumerate(libraries):
                library.impl("sinh", lambda x, number=number: x * 0 + number, "AutocastCPU", **OVERRIDE)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert x.sinh().item() == 1
            for library in libraries:
                remove_kernels(library)
            assert torch.equal(x.sinh(), expected), "Library._destroy no longer takes kernels out"
    finally:
        for library in libraries:
            remove_kernels(library)
