"""Where a kernel runs: phase, module, line of the user's code and torch-level call.

Modules and optimizer steps are known from hooks. A kernel of the backward pass belongs to the module and line of its
forward, which are remembered by the number of the autograd node.
"""

import itertools
import threading
from typing import Any

import torch
from torch import nn

from mezzo._torch.autograd_engine import current_node, graph_task_id, next_node_number, number_of_node
from mezzo.amp import is_excluded
from mezzo.amp.user_lines import users_line
from mezzo.record._kernel_runs import Phase
from mezzo.record._torch_calls import Call

_KEPT_NODES = 2**17  # of the forward, for their backward; a recording of many steps forgets the oldest

Origin = tuple[str, str, str]
"""Module, line and torch-level call that an autograd node comes from."""
_NOWHERE: Origin = ("", "", "")


class Place:
    """Where one thread is: torch-level call, modules, optimizer steps. Autograd threads have their own."""

    __slots__ = ("around", "call", "is_excluded", "is_root_named", "modules", "nodes", "num_ranges", "path", "steps")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.modules: list[nn.Module] = []
        self.around: list[tuple[str | None, bool]] = []
        """For each of them, `path` and `is_excluded` from before it was entered."""
        self.path: str | None = ""
        self.is_root_named = True
        self.is_excluded = False
        """Whether a module on the stack is kept in float32; valid if `path` is not None."""
        self.nodes: dict[int, Origin] = {}
        """Origins of nodes of a forward that this thread recomputed in a backward."""
        self.num_ranges = 0
        self.steps: list[int] = []
        """For each optimizer step in progress, how many profiler ranges were open when it began."""


class ThreadPlaces(threading.local):
    def __init__(self) -> None:
        self.current = Place()


class Locator:
    """Follows modules, optimizer steps and autograd nodes, thread by thread."""

    def __init__(self) -> None:
        self.places = ThreadPlaces()
        self.nodes: dict[int, Origin] = {}
        """Where autograd nodes come from, by their number."""
        self.wants_lines = False
        self._paths: dict[int, tuple[str, nn.Module]] = {}
        """By the module's id, which cannot be reused while this holds the module."""

    def locate(self, place: Place, call: Call | None) -> tuple[Phase, Origin]:
        """Return phase, module, line and call of the current kernel; for a gradient, those of its forward."""
        if graph_task_id() != -1 or (call is not None and call.in_backward):
            phase: Phase = "backward"
            node = current_node()
            if node is not None and not place.modules:
                number = number_of_node(node)
                return phase, place.nodes.get(number) or self.nodes.get(number) or _NOWHERE
            nodes = self.nodes if node is None else place.nodes
        else:
            # a closure may run the model inside step()
            phase = "optimizer" if place.steps and not place.modules else "forward"
            nodes = self.nodes
        path = place.path
        if path is None:
            path = self._find_path(place)
        origin = (path, users_line() if self.wants_lines else "", call.name if call else "")
        # The first kernel after a node was created is the node's forward. Later kernels may create no node.
        if nodes.setdefault(next_node_number() - 1, origin) is origin and len(nodes) > _KEPT_NODES:
            for number in list(itertools.islice(nodes, _KEPT_NODES // 2)):
                del nodes[number]
        return phase, origin

    def _find_path(self, place: Place) -> str:
        """Return the path of the innermost module that has one, and cache it."""
        # In the backward (checkpointing) the true root is not on the stack: keep the names of the forward.
        if not place.is_root_named and graph_task_id() == -1:
            self._paths.update((id(named[1]), named) for named in place.modules[0].named_modules())
            place.is_root_named = True
        path: str | None = None
        place.is_excluded = False
        for module in reversed(place.modules):
            if path is None:
                named = self._paths.get(id(module))
                path = None if named is None else named[0]
            if is_excluded(module):
                place.is_excluded = True
        place.path = path or ""
        return place.path

    def enter_module(self, module: nn.Module, args: Any) -> None:
        place = self.places.current
        if not place.modules:
            place.is_root_named = False
        place.around.append((place.path, place.is_excluded))
        place.modules.append(module)
        place.path = None

    def leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        place = self.places.current
        for index in range(len(place.modules) - 1, -1, -1):
            if place.modules[index] is module:  # modules above it were left by an exception, which runs no hooks
                place.path, place.is_excluded = place.around[index]
                del place.modules[index:], place.around[index:]
                break

    def enter_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        place = self.places.current
        place.steps.append(place.num_ranges)

    def leave_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.places.current.steps:
            self.places.current.steps.pop()

    def note_range(self, change: int) -> None:
        """Follow profiler ranges: a step that raises runs no post hook, but it leaves its range."""
        place = self.places.current
        place.num_ranges += change
        while place.steps and place.steps[-1] > place.num_ranges:
            place.steps.pop()
