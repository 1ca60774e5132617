"""The weights of a model next to its checkpoint, in formats for other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mezzo.checkpoint._tensors import pack_tensors
from mezzo.checkpoint._weights_files import save_pdparams
from mezzo.files import write_file

WEIGHTS, PADDLE_WEIGHTS = "model.safetensors", "model.pdparams"


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write `model.safetensors` and, for a network of `mezzo.vision.models`, `model.pdparams`; `load_weights` reads both.

    Args:
        folder: Created if missing.
        model: Not wrapped for distributed training: names are as in its `state_dict()`. Half values are written as
            float32; those of a decorated model are its masters.

    Raises:
        RunError: Writing failed.
    """
    write_file(folder / WEIGHTS, pack_tensors({name: _wide(value) for name, value in model.state_dict().items()}))
    if isinstance(getattr(model, "model_name", None), str):
        save_pdparams(model, folder / PADDLE_WEIGHTS)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
