"""Random states: seed them for runs that are compared, and restore them afterwards."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def random_states_kept(gpus: Sequence[int | torch.device] = ()) -> Iterator[None]:
    """Restore every global random state at the end, including those of all GPUs.

    Args:
        gpus: GPUs that are used inside. Without any, GPU states are restored only if CUDA is
            already in use.
    """
    python, numpy = random.getstate(), np.random.get_state()
    kept = range(torch.cuda.device_count()) if gpus or torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=kept):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def torch_state(device: torch.device) -> Tensor:
    """Return the states of torch's generators of the CPU and of a device as one tensor."""
    cpu = torch.get_rng_state()
    return torch.cat([cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else cpu
