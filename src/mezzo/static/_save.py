"""Saving and loading the forward of a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mezzo._torch.exported_programs import no_hooks_left
from mezzo.amp import float32_copy
from mezzo.errors import DeployError, RunError
from mezzo.export import forget_places, load_program, quietly, write_program
from mezzo.static._input_names import name_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from mezzo.static._variables import InputSpec

_SAMPLES = (2, 64, 96, 128, 160)
"""Sample sizes of free dimensions, by axis: unequal, large, and not 0 or 1, which torch fixes."""


def save_forward(module: nn.Module, inputs: Sequence[InputSpec], path: Path, *, shown: Path | None = None) -> None:
    """Write a forward, in evaluation and float32, as a `torch.export` file.

    Warns if `load_forward` will refuse it.

    Args:
        module: Takes the inputs in this order.
        inputs: Its inputs, in order.
        path: Usually ends in .pt2.
        shown: The file name for warnings, if `path` is a temporary file.

    Raises:
        RunError: torch cannot export it.
    """
    samples = tuple(torch.zeros(_sample_shape(spec.shape), dtype=spec.dtype) for spec in inputs)
    free = tuple({axis: torch.export.Dim.DYNAMIC for axis, s in enumerate(spec.shape) if s < 0} for spec in inputs)
    try:
        with quietly(), no_hooks_left(), torch.no_grad():
            exported = torch.export.export(float32_copy(module).eval(), samples, dynamic_shapes=free, strict=False)
    except Exception as error:  # the user's network may raise anything
        raise RunError(f"the program cannot be exported: {' '.join(str(error).split())[:400]}") from error
    forget_places(exported)
    write_program(exported, path, shown=shown)


def _sample_shape(shape: Sequence[int]) -> list[int]:
    return [_SAMPLES[min(axis, len(_SAMPLES) - 1)] if size < 0 else size for axis, size in enumerate(shape)]


def load_forward(path: Path) -> tuple[ExportedProgram, dict[str, tuple[list[int], torch.dtype]]]:
    """Return a forward from `save_forward`, and shape (-1: free) and dtype of its inputs by name.

    Raises:
        DeployError: The file is damaged, holds more than a forward, or has two inputs of one name.
    """
    exported = load_program(path, keep_sizes=True)
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = {}
    for name in exported.graph_signature.user_inputs:
        value, own = values[str(name)], name_of(str(name))
        if own in inputs:
            raise DeployError(f"{path}: two inputs have the name {own!r}; not loaded")
        inputs[own] = ([size if isinstance(size, int) else -1 for size in value.shape], value.dtype)
    return exported, inputs
