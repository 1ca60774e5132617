"""Tensors of any dtype in one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mezzo.checkpoint._errors import CheckpointError
from mezzo.dtypes import dtype_name

# Dtypes of every safetensors release; other dtypes are stored as bytes, with their name in state.json.
_PLAIN = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_PLAIN |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_OTHERS = {
    name: getattr(torch, name)
    for name in (
        "complex32 complex64 complex128 uint16 uint32 uint64 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
}


def library() -> Any:
    """Return safetensors' module for torch.

    Raises:
        CheckpointError: It is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("checkpoints need the package safetensors: pip install 'mezzo[vision]'") from error
    return safetensors.torch


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a safetensors file; views and shared storages become copies."""
    data: bytes = library().save({name: _own_values(name, value) for name, value in tensors.items()})
    return data


def _own_values(name: str, value: Tensor) -> Tensor:
    value = value.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    if value.dtype in _PLAIN:
        return value
    if dtype_name(value.dtype) not in _OTHERS:
        raise CheckpointError(f"state: {name} is of {value.dtype}, which a checkpoint cannot hold; convert it first")
    return value.reshape(-1).view(torch.uint8)


def foreign_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return dtype and shape of the tensors that are stored as bytes, as JSON data."""
    return {
        name: [dtype_name(value.dtype), list(value.shape)]
        for name, value in tensors.items()
        if value.dtype not in _PLAIN
    }


def unpack_tensors(data: bytes, foreign: Any) -> dict[str, Tensor]:
    """Return the tensors of a file's content, on the CPU, each with its own storage.

    Args:
        data: From `pack_tensors`, or untrusted.
        foreign: From `foreign_dtypes`, or untrusted JSON data.

    Raises:
        Exception: The content is damaged; the type depends on the damage.
    """
    tensors: dict[str, Tensor] = library().load(data)
    for name, (dtype, shape) in dict(foreign).items():
        tensors[name] = tensors[name].view(_OTHERS[dtype]).reshape(shape)
    return tensors
