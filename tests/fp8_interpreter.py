"""Triton's interpreter with FP8 numbers as a GPU makes them.

Its own conversion drops the carry of a mantissa that is rounded up into the next power of two: 31.5 becomes 16.
"""

from typing import Any

import pytest
import torch


def round_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert float32 to FP8 as torch does: to nearest even."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    convert: Any = interpreter._convert_float

    def convert_right(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != tl.float32 or target not in formats:
            return convert(numbers, source, target, rounding)
        exact = torch.from_numpy(np.ascontiguousarray(numbers).copy())
        return exact.to(formats[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_right)
