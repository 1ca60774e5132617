"""Messages of Inductor about operators without a lowering, written only if they are read.

Why: for each operator of mezzo torch writes the first call into a log message, with all that its
arguments are computed from, whether or not the message is logged. In HRNet this took a sixteenth of
a build. Later releases of torch write it lazily themselves.
Releases: needed in 2.11; 2.13 does not need it.
Without it: a first step on a GPU takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mezzo._torch.patches import wrap_attribute


def write_messages_lazily() -> None:
    """Let torch describe an operator without a lowering only if the description is read. Loads Inductor."""
    from torch._inductor.exc import OperatorIssue

    wrap_attribute(OperatorIssue, "operator_str", _lazily, static=True)


def _lazily(describe: Callable[..., str]) -> Callable[..., Any]:
    from torch._logging._internal import LazyString

    return lambda *args, **kwargs: LazyString(describe, *args, **kwargs)
