"""Checkpoints: folders that are there whole or not at all, without pickle."""

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._find import BEST, find_weights
from mezzo.checkpoint._state import State, read_state, verify, write_state
from mezzo.checkpoint._store import CheckpointStore
from mezzo.checkpoint._tensors import unpack_tensors
from mezzo.checkpoint._tree import Tree
from mezzo.checkpoint._weights import save_weights

__all__ = [
    "CheckpointStore",
    "write_state",
    "read_state",
    "verify",
    "State",
    "Tree",
    "save_weights",
    "unpack_tensors",
    "find_weights",
    "BEST",
    "CheckpointError",
]
