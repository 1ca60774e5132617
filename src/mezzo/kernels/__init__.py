"""Operators of mezzo's own, registered with torch: eager mode and compiled graphs call the same kernels.

Importing this package registers them all: compiled code from a cache on disk may call any of them.
"""

from mezzo.kernels._cross_entropy import fused_cross_entropy
from mezzo.kernels._norms import MOST_NORMED, fused_layer_norm, fused_rms_norm

__all__ = ["MOST_NORMED", "fused_cross_entropy", "fused_layer_norm", "fused_rms_norm"]
