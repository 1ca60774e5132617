"""Graph mode: a whole training step captured once and replayed."""

from mezzo.static._capture import CapturedStep, capture_step

__all__ = ["capture_step", "CapturedStep"]
