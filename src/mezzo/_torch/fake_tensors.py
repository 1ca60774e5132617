"""Tensors without memory, and tensors that a tracer hands out in place of real ones.

Why: static programs try each call on tensors without memory; FP8 products accept the tensors of a
tracer.
Releases: 2.11 to 2.15.
Without it: no static program can be written; captured graphs at level O3 compute in half.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["FakeTensor", "FakeTensorMode", "FunctionalTensor", "no_report_of_misfits"]


@contextmanager
def no_report_of_misfits() -> Iterator[None]:
    """Inside, torch does not log a call that does not fit; its exception says the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
