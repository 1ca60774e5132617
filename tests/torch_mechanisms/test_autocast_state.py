"""The autocast state is read at once, and Dynamo guards the device types that carry mezzo's numbers."""

import pytest
import torch

from mezzo._torch import autocast_state
from mezzo._torch.autocast_state import HALF_LAYER_DEVICE, MARKER_DEVICES


def test_any_autocast_is_noticed() -> None:
    assert not autocast_state.is_any_autocast_enabled(), "torch._C._is_any_autocast_enabled is gone: steps get slower"
    torch.set_autocast_enabled("cpu", True)  # every region has the CPU's or CUDA's on; 2.11 does not count the others
    try:
        assert autocast_state.is_any_autocast_enabled()
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_nothing_is_cast_inside_no_autocast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast_state.no_autocast():
            assert (x @ x).dtype is torch.float32
        assert (x @ x).dtype is torch.bfloat16


@pytest.mark.parametrize("device_type", [*MARKER_DEVICES, HALF_LAYER_DEVICE])
def test_a_carrier_takes_every_dtype_and_dynamo_compiles_again(device_type: str) -> None:
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    assert before[0] is False, f"somebody uses autocast of {device_type}"
    compilations = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        compilations.append(module)
        return module

    @torch.compile(backend=backend)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    try:
        double(torch.ones(1))
        torch.set_autocast_enabled(device_type, True)
        for count, dtype in enumerate((torch.complex64, torch.int8), start=2):
            torch.set_autocast_dtype(device_type, dtype)
            assert torch.get_autocast_dtype(device_type) is dtype
            double(torch.ones(1))
            double(torch.ones(1))
            assert len(compilations) == count, f"Dynamo no longer guards the autocast state of {device_type}"
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
        torch.compiler.reset()
