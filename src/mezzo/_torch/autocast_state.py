"""The autocast state of a thread, and device types whose autocast dtype holds state of mezzo.

Why: Dynamo guards and traces torch's autocast state of every device type that torch knows, and
nothing of mezzo's. So mezzo writes its own state into the autocast state of device types that no
machine here has (`MARKER_DEVICES`, `HALF_LAYER_DEVICE`): a function compiled under one policy is
compiled again under another.
Releases: 2.11 to 2.15. `is_any_autocast_enabled` falls back to True, which is right too, only
slower.
Without the carriers: a compiled function is used under a policy that it was not compiled for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["HALF_LAYER_DEVICE", "MARKER_DEVICES", "is_any_autocast_enabled", "no_autocast"]

is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

no_autocast = torch._C._DisableAutocast
"""A context in which no autocast key is active in this thread."""

MARKER_DEVICES = ("maia", "ipu")
"""Device types whose autocast dtypes hold the number of the policy."""

HALF_LAYER_DEVICE = "mtia"
"""Device type whose autocast is on inside a layer that stays in half at level O3."""
