"""Random numbers of runs that are compared: the same in each, and given back afterwards."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed every generator that a step may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def random_states_kept(gpus: Sequence[int | torch.device] = ()) -> Iterator[None]:
    """Give every global random state back as it was, with those of all GPUs: `seed_all` seeds all of them.

    Args:
        gpus: That are used inside. Without any, the states of GPUs are kept only if CUDA is in use already.
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
    """Return the state of torch's generators of the CPU and of a device, as one tensor."""
    of_cpu = torch.get_rng_state()
    return torch.cat([of_cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_cpu
