"""R14: another library takes over an operator on the same dispatch key."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from mezzo.amp import auto_cast, debugging


@pytest.fixture
def intruder() -> Iterator[None]:
    with auto_cast(level="O2", use_promote=False):
        pass
    library = torch.library.Library("aten", "IMPL")
    # An operator that no other test records: under a dispatch mode torch goes on with a kernel that was destroyed.
    library.impl("celu", lambda x, alpha=1.0: x, "AutocastCPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_replaced_kernel_is_found_and_named(intruder: None) -> None:
    assert debugging.replaced_kernels() == ["aten::celu (cpu)"]


def test_nothing_is_reported_while_all_kernels_are_ours() -> None:
    for level in ("OD", "O1", "O2"):
        with auto_cast(level=level):
            pass
    assert debugging.replaced_kernels() == []


def test_debug_mode_checks_at_the_entry_of_a_region() -> None:
    script = (
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "from mezzo.amp import auto_cast\n"
        "with auto_cast(level='OD'): pass\n"
        "lib = torch.library.Library('aten', 'IMPL'); lib.impl('relu', lambda x: x, 'AutocastCPU', allow_override=True)\n"
        "with auto_cast(level='O2'): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "MEZZO_DEBUG": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "another library replaced 1 autocast kernel(s) of mezzo: aten::relu (cpu)" in done.stderr
