"""The guards of an `ExportedProgram`: conditions on sizes that held for the sample input.

Why: torch 2.11 guards remainders of sizes in pooling although both branches give the same size, and
writing guards took half of the time of an ONNX export.
Releases: 2.11 to 2.15. A release without the list has no such guards.
Without it: exported networks refuse sizes that they can compute.
"""

from __future__ import annotations

from torch.export import ExportedProgram


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the guards of a program as texts.

    The list is the program's own and may be changed in place.
    """
    guards = getattr(program, "_guards_code", None)
    return guards if isinstance(guards, list) else []
