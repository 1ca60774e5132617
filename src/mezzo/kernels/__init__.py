"""Operators of mezzo's own, registered with torch: eager mode and compiled graphs call the same kernels.

Importing this package registers them all: compiled code from a cache on disk may call any of them.
"""

__all__: list[str] = []
