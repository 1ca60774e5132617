"""What mezzo attaches to parameters, and deep copies of them.

Why: a half parameter holds its float32 master as an attribute: `mezzo.optim` writes it, `mezzo.fp8`
looks for it. Saving keeps attributes of a parameter, but `copy.deepcopy` drops them.
Releases: 2.11 to 2.15.
Without it: the copy of a decorated model trains without masters.
"""

from __future__ import annotations

from torch import Tensor, nn

from mezzo._torch.patches import Around, wrap_attribute

MASTER_ATTRIBUTE = "_mezzo_master"
"""Saved files hold this name too."""


def has_master(param: Tensor) -> bool:
    """Whether a parameter has a float32 master; the master is not brought up to date."""
    return hasattr(param, MASTER_ATTRIBUTE)


def wrap_parameter_copies(around: Around) -> None:
    """Let `around` wrap `nn.Parameter.__deepcopy__`, for the whole process."""
    wrap_attribute(nn.Parameter, "__deepcopy__", around)
