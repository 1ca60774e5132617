"""The table of levels and dtypes."""

import subprocess
import sys

import pytest
import torch

from mezzo.dtypes import HALF_DTYPES, HALF_NAMES, HALF_SPELLINGS, LEVELS, PRECISION_DTYPES, dtype_name, parse_half_dtype


def test_names_and_dtypes_agree():
    assert tuple(map(dtype_name, HALF_DTYPES)) == HALF_NAMES
    assert all(parse_half_dtype(word) in HALF_DTYPES for word in HALF_SPELLINGS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in PRECISION_DTYPES.values())


def test_table_loads_without_torch():
    code = "import sys, mezzo.dtypes; print(*mezzo.dtypes.LEVELS, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*LEVELS, "False"]


def test_unknown_name_of_the_table_raises_attribute_error():
    import mezzo.dtypes

    with pytest.raises(AttributeError, match="nothing"):
        mezzo.dtypes.nothing  # noqa: B018
