"""The frame of all benchmarks."""

import pytest

from mezzo.bench import Bench, MachineClocks


def test_a_benchmark_without_cells_or_figures_cannot_be_made() -> None:
    machine = MachineClocks(
        device="d", mem_clock="-", sm_clock="-", cpu_clocks="-", torch_version="t", driver_version="v"
    )
    with pytest.raises(TypeError, match=r"cells.*figures"):
        Bench(settings=None, results=(), machine=machine)  # type: ignore[abstract]
