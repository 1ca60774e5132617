"""What `import mezzo` offers."""

import subprocess
import sys

import pytest

import mezzo
from mezzo.errors import RunError
from mezzo.vision.data import DataError


def test_every_name_of_all_is_there():
    assert all(getattr(mezzo, name) is not None for name in mezzo.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        mezzo.nothing  # noqa: B018


def test_one_class_catches_all_errors_and_knows_the_exit_code():
    assert issubclass(DataError, mezzo.MezzoError)
    assert (DataError("x").exit_code, RunError("x").exit_code) == (2, 1)


def test_importing_mezzo_loads_neither_torch_nor_a_training_engine():
    code = "import mezzo, sys; print(mezzo.__version__, 'torch' in sys.modules, 'mezzo.vision.train' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, *loaded = done.stdout.split()
    assert version[0].isdigit()
    assert loaded == ["False", "False"]
