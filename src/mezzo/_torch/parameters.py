"""Deep copies of parameters.

Why: `copy.deepcopy` of a parameter drops attributes attached to it, and so its float32 master.
Releases: 2.11 to 2.15.
Without it: the copy of a decorated model trains without masters.
"""

from __future__ import annotations

from torch import nn

from mezzo._torch.patches import Around, wrap_attribute


def wrap_parameter_copies(around: Around) -> None:
    """Let `around` wrap `nn.Parameter.__deepcopy__`, for the whole process."""
    wrap_attribute(nn.Parameter, "__deepcopy__", around)
