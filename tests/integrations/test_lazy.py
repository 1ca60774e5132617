"""What importing mezzo and its integrations loads; runs in every environment."""

import importlib.util
import subprocess
import sys

import pytest

FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "timm", "peft")


@pytest.mark.parametrize("module", ["mezzo.model", "mezzo.integrations.lightning", "mezzo.integrations.timm"])
def test_importing_mezzo_loads_no_framework(module):
    code = f"import {module}, sys; print([name for name in {FRAMEWORKS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("lightning") is not None, reason="lightning is installed")
def test_a_missing_lightning_is_one_line_that_says_what_to_install():
    from mezzo.errors import MissingExtra

    with pytest.raises(MissingExtra, match=r"^MezzoPrecision needs .*: pip install 'mezzo\[lightning\]'$"):
        from mezzo.integrations.lightning import MezzoPrecision  # noqa: F401
