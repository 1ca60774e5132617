"""Trials: train a copy of a model on one batch, with one precision and one set of changes."""

from mezzo.trial._changes import (
    NO_CHANGES,
    Changes,
    ChangesError,
    apply_changes,
    can_be_padded,
    channels_of,
    pad_layer,
    read_changes,
)
from mezzo.trial._inputs import arguments_of, batch_size_of, call_model
from mezzo.trial._random import random_states_kept, seed_all, torch_state
from mezzo.trial._trial import Trial, TrialSetup, Workload

__all__ = [
    "Workload",
    "TrialSetup",
    "Trial",
    "Changes",
    "NO_CHANGES",
    "ChangesError",
    "apply_changes",
    "read_changes",
    "can_be_padded",
    "channels_of",
    "pad_layer",
    "call_model",
    "arguments_of",
    "batch_size_of",
    "random_states_kept",
    "seed_all",
    "torch_state",
]
