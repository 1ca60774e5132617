"""The forward of a program without an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from mezzo.static._graph import Capture, CapturedGraph
from mezzo.static._region import casting_region


class Forward:
    """The forward of a program, captured for each new shape."""

    def __init__(self, module: GraphModule, capture: Capture, is_test: bool) -> None:
        self._capture, self._module = capture, module
        self._function = capture.compile(module, dynamic=None)
        self._training = not is_test

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs captured so far."""
        return list(self._capture.graphs)

    def run(self, feeds: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results for some inputs."""
        with ExitStack() as stack:
            if not self._training:
                stack.enter_context(_evaluating(self._module))
            stack.enter_context(torch.no_grad())
            stack.enter_context(casting_region(self._capture.precision))
            results: tuple[Tensor, ...] = self._function(*feeds)
        return results


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, a module and its parts are in eval mode; afterwards their modes are restored."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:  # one by one, because modules loaded from a file refuse eval()
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
