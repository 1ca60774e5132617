"""Training states, which are there whole or not at all, and files of weights; nothing runs a pickle's code."""

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._find import BEST, find_weights
from mezzo.checkpoint._state import State, read_state, verify, write_state
from mezzo.checkpoint._store import CheckpointStore
from mezzo.checkpoint._tensors import unpack_tensors as unpack_tensors
from mezzo.checkpoint._torch_file import read_torch_file as read_torch_file
from mezzo.checkpoint._tree import Tree
from mezzo.checkpoint._weights import save_weights
from mezzo.checkpoint._weights_files import (
    LoadReport,
    WeightsError,
    convert,
    load_paddle_state,
    load_pdparams,
    load_weights,
    paddle_state,
    read_pdparams,
    save_pdparams,
)
from mezzo.checkpoint._weights_files import read_torch_state as read_torch_state

# What users call. The names imported `as` themselves above are for other packages of mezzo.
__all__ = [
    "load_weights",
    "save_weights",
    "find_weights",
    "convert",
    "load_pdparams",
    "save_pdparams",
    "read_pdparams",
    "load_paddle_state",
    "paddle_state",
    "LoadReport",
    "WeightsError",
    "CheckpointStore",
    "write_state",
    "read_state",
    "verify",
    "State",
    "Tree",
    "BEST",
    "CheckpointError",
]
