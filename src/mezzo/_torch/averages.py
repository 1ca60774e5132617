"""`torch.optim.swa_utils.AveragedModel`: how it copies a model, and how it takes in new weights.

Why: an average moves by less than a half weight can show, so averages of decorated models are
float32 and made from masters. There is no hook: `avg_fn` sees tensors, but not whose they are.
torchvision's and others' EMA are subclasses.
Releases: 2.11 to 2.15; the class is public, but replacing its methods is not.
Without it: SWA and EMA of a decorated model stand still.
"""

from __future__ import annotations

from torch.optim.swa_utils import AveragedModel

from mezzo._torch.patches import Around, wrap_attribute


def wrap_averages(around_init: Around, around_update: Around) -> None:
    """Let two functions wrap how an average is created, and how it is updated from a model."""
    wrap_attribute(AveragedModel, "__init__", around_init)
    wrap_attribute(AveragedModel, "update_parameters", around_update)
