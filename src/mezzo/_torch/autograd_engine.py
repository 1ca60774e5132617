"""autograd's engine: the current backward pass and node, callbacks at its end, forward mode.

Why: a recording joins the kernels of a backward pass to the modules of the forward pass by the
numbers of nodes. The loss scaler compares gradients before and after a backward pass. FP8 products
have no forward derivative.
Releases: 2.11 to 2.15. If a release lacks a function, these functions report no backward pass, no
node, and number 0.
Without it: recordings take a backward pass for a forward one; no warning about gradients that carry
the loss scale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, forward_ad

graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Number of the backward pass that runs in this thread, -1 outside of one."""
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
next_node_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""Number that the next node of this thread gets."""
number_of_node: Callable[[Any], int] = methodcaller("_sequence_nr")

queue_callback: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
"""Call a function at the end of the backward pass that runs now."""


def hook_only(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Call a hook with the gradient of a tensor that has no hooks yet.

    Do nothing if the tensor has hooks.

    The same as `Tensor.register_hook` without its handle, which takes three times as long.
    """
    node = tensor.grad_fn
    if node is not None and tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict(((-1, hook),))  # handles count from 0
        node._register_hook_dict(tensor)


def has_forward_mode() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open."""
    return forward_ad._current_level >= 0
