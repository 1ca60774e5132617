"""The calls of a model's modules, for listeners that need no kernels.

Unlike `listening`, this installs no dispatch mode: the model runs exactly the same kernels as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from mezzo._torch.autograd_engine import graph_task_id


class ModuleListener:
    """Receives the calls of modules and the gradients of parameters; every method may be overridden."""

    def enter_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Receive a call before the module runs."""

    def leave_module(self, path: str, module: nn.Module, output: Any) -> None:
        """Receive the result of a call; a call that raises has none."""

    def accumulate_grad(self, name: str, parameter: Tensor) -> None:
        """Receive a parameter whose `grad` the backward pass has just updated."""


@contextmanager
def listening_to_modules(model: nn.Module, listener: ModuleListener) -> Iterator[None]:
    """Show a listener the modules of `model` that are called inside.

    What activation checkpointing computes again during the backward pass is not shown again. All hooks are removed at
    the end, also after an exception.
    """

    def unless_recomputed(receive: Callable[..., None]) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            if graph_task_id() == -1:  # otherwise the backward pass recomputes a checkpointed region
                receive(*args)

        return hook

    def enter(path: str) -> Callable[..., None]:
        return unless_recomputed(lambda module, args, kwargs: listener.enter_module(path, module, args, kwargs))

    def leave(path: str) -> Callable[..., None]:
        return unless_recomputed(lambda module, args, kwargs, output: listener.leave_module(path, module, output))

    def accumulate(name: str) -> Callable[[Tensor], None]:
        return lambda parameter: listener.accumulate_grad(name, parameter)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(path), with_kwargs=True).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf:
                hooks.callback(parameter.register_post_accumulate_grad_hook(accumulate(name)).remove)
        yield
