"""Export of a network to a `torch.export` program and to ONNX."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from mezzo._torch.exported_programs import guards_of, no_hooks_left
from mezzo._torch.operators import ASSERT_TENSOR_METADATA
from mezzo.errors import RunError
from mezzo.export._programs import forget_places, quietly
from mezzo.export._rewrites import rewrite
from mezzo.files import write_file

INPUT, OUTPUT = "images", "output"
_REMAINDER = re.compile(r"% \d+\)* [!=]= 0\)*$")
_SAMPLE = (2, 192, 256)  # batch, height, width: all different, and not 0 or 1, which torch treats as fixed


def trace(network: nn.Module, shape: tuple[int, ...], *, takes_any_size: bool = False) -> ExportedProgram:
    """Return the program of a network for inputs of a shape; -1 is a free size.

    Args:
        network: A network whose input is images.
        shape: Batch, channels, height and width of the images.
        takes_any_size: The network was tested with sizes of different remainders, so remove guards
            about remainders.

    Raises:
        RunError: torch cannot export the network, or the network fixes a size that should be free.
    """
    batch, channels, height, width = shape
    sizes = tuple(free if given < 0 else given for free, given in zip(_SAMPLE, (batch, height, width), strict=True))
    sample = torch.zeros(sizes[0], channels, sizes[1], sizes[2])
    free = {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(shape) if size < 0}
    try:
        with quietly(), no_hooks_left(), torch.no_grad():
            program = torch.export.export(network, (sample,), dynamic_shapes=(free,), strict=False)
    except Exception as error:  # a user's network can raise anything
        first = " ".join(str(error).split())[:400]
        raise RunError(f"the network cannot be exported for input {list(shape)}: {first}") from error
    _drop_dtype_checks(program)
    if takes_any_size:
        _drop_remainder_guards(program)
    forget_places(program)
    return program


def _drop_dtype_checks(program: ExportedProgram) -> None:
    """Remove the assertions about the dtype of casts: under `auto_cast` it differs from the sample's."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is ASSERT_TENSOR_METADATA:
            graph.erase_node(node)
    program.graph_module.recompile()


def _drop_remainder_guards(program: ExportedProgram) -> None:
    """Remove guards such as `(size // 2) % 2 != 0`.

    torch 2.11 rounds the output size of pooling with a branch on the remainder. It then requires
    the sample's remainder, although both branches give the same size.
    """
    guards = guards_of(program)
    guards[:] = [text for text in guards if not _REMAINDER.search(text)]


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write a program as ONNX, atomically.

    Raises:
        RunError: torch cannot export the program to ONNX.
    """
    import onnx

    model = to_onnx(program)
    buffer = io.BytesIO()
    onnx.save_model(model, buffer)
    write_file(path, buffer.getvalue())


def to_onnx(program: ExportedProgram) -> Any:
    """Return a program as an ONNX model."""
    try:
        with quietly(), contextlib.redirect_stdout(io.StringIO()), _without_guards(program):
            made = torch.onnx.export(
                program, (), dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False, external_data=False
            )
    except Exception as error:  # see trace
        first = " ".join(str(error).split())[:400]
        raise RunError(f"the network cannot be written as ONNX: {first}") from error
    assert made is not None
    model = made.model_proto
    _name_free_sizes(model.graph)
    for node in model.graph.node:  # remove source lines and file names of this machine
        del node.metadata_props[:]
    return rewrite(model)


@contextlib.contextmanager
def _without_guards(program: ExportedProgram) -> Iterator[None]:
    """Disable guards during the ONNX export, which ignores them: an HRNet exports twice as fast."""
    guards = guards_of(program)
    kept = guards[:]
    guards.clear()
    try:
        yield
    finally:
        guards[:] = kept


def _name_free_sizes(graph: Any) -> None:
    """Name the free sizes batch, height and width instead of torch's symbols."""
    dims = graph.input[0].type.tensor_type.shape.dim
    names = {
        dim.dim_param: name
        for dim, name in zip(dims, ("batch", "channels", "height", "width"), strict=True)
        if dim.dim_param
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]
