"""Lite data: small sets that are drawn, the same each time. Only `mezzo prepare` and `mezzo tipc prepare` load this."""

from mezzo.vision.lite._prepare import LITE, LITE_MARKER, prepare

__all__ = ["prepare", "LITE", "LITE_MARKER"]
