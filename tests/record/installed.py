"""What a recording installs in the whole process."""

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer


def installed() -> list[object]:
    """Everything global that a recording may install."""
    stacks = [
        *(torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())),
        *(torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())),
    ]
    hooks = [
        nn_module._global_forward_pre_hooks,
        nn_module._global_forward_hooks,
        nn_module._global_forward_hooks_always_called,
        nn_module._global_forward_hooks_with_kwargs,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    return stacks + [key for table in hooks for key, hook in table.items() if not _is_lasting(hook)]


def _is_lasting(hook: object) -> bool:
    """Whether a hook is one that the first region, `decorate` or `GradScaler` leaves: it belongs to another test."""
    return getattr(hook, "__module__", "") in ("mezzo.amp._steps", "mezzo.amp._scaler_watch")
