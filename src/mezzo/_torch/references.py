"""One more reference to an object, given away for good.

Why: `thread_store` of some torch releases takes a reference that it was not given, and the object
dies while it is in use. Python has no function for this; the C interface has, and ctypes calls it.
Releases: every CPython.
Without it: the policy of a thread is freed while kernels read it (torch 2.11 crashes).
"""

from __future__ import annotations

import ctypes

add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
"""Raise the reference count of an object by one."""
