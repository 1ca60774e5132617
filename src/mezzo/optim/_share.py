"""The weights of one process copied to all others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mezzo.fp8 import renew_copies
from mezzo.optim._masters import master_of, publish


@torch.no_grad()
def share_weights(model: nn.Module, group: Any = None) -> None:
    """Copy weights and buffers of the first process of a group to all; half weights by their masters.

    Args:
        model: The same network in every process.
        group: The process group; None: all processes.
    """
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for param in model.parameters():
        master = master_of(param)
        if master is None:
            dist.broadcast(param, first, group=group)
        else:
            dist.broadcast(master, first, group=group)
            publish([param], [master])
    renew_copies(model.parameters())
    for buffer in model.buffers():
        dist.broadcast(buffer, first, group=group)
