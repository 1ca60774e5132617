"""torch's clipping of gradients, seen by the function through which all of it goes.

Why: `clip_grad_norm_` on gradients that carry the loss scale clips far too much, and mezzo warns of
it. Users import the clipping functions by name, before or after mezzo, so it must be seen where
those look a helper up.
Releases: 2.11 to 2.15. In a release without that helper nothing is patched.
Without it: no warning.
"""

from __future__ import annotations

from torch.nn.utils import clip_grad

from mezzo._torch.patches import Around, wrap_attribute

_HELPER = "_group_tensors_by_device_and_dtype"


def wrap_grouping_of_gradients(around: Around) -> bool:
    """Let `around` wrap what the clipping functions call with `[gradients]`.

    Return whether this torch has it.
    """
    if not hasattr(clip_grad, _HELPER):
        return False
    wrap_attribute(clip_grad, _HELPER, around)
    return True
