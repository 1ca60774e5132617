"""Backward passes of custom autograd Functions.

Why: a Function without `custom_fwd` and `custom_bwd` runs its backward without casting, and torch's
error about dtypes does not say so. mezzo adds a note to that error.
Releases: 2.11 to 2.15; the class is not private, but replacing its method is.
Without it: the error has no note.
"""

from __future__ import annotations

from torch.autograd.function import BackwardCFunction

from mezzo._torch.patches import Around, wrap_attribute


def wrap_function_backwards(around: Around) -> None:
    """Let `around` wrap the backward of every custom Function: `(ctx, *gradients)`."""
    wrap_attribute(BackwardCFunction, "apply", around)
