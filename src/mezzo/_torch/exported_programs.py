"""The guards of an `ExportedProgram`, and what a failed export leaves behind.

Why: guards are conditions on sizes that held for the sample input. torch 2.11 guards remainders of
sizes in pooling although both branches give the same size, and writing guards took half of the time
of an ONNX export. In torch 2.11 and 2.12 an export that fails leaves a hook of its own on all
modules of the process.
Releases: 2.11 to 2.15. A release without the list has no such guards.
Without it: exported networks refuse sizes that they can compute. After a failed export, graph mode
cannot capture a module that assigns a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.export import ExportedProgram
from torch.nn.modules import module as torch_module


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the guards of a program as texts.

    The list is the program's own and may be changed in place.
    """
    guards = getattr(program, "_guards_code", None)
    return guards if isinstance(guards, list) else []


@contextmanager
def no_hooks_left() -> Iterator[None]:
    """Remove torch's own hooks on buffers that an export inside registers and, when it fails, leaves."""
    hooks = torch_module._global_buffer_registration_hooks
    before = set(hooks)
    try:
        yield
    finally:
        for key in [key for key in hooks if key not in before]:
            if getattr(hooks[key], "__module__", "").startswith("torch._functorch"):
                del hooks[key]
