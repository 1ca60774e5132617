"""Captures of CUDA graphs whose cuBLAS workspaces belong to them.

Why: torch keeps one workspace per stream, and frees it when another graph of the stream goes or
when Inductor captures one. A graph that had only borrowed it would write into freed memory (pytorch
issue 193402).
Releases: 2.11 to 2.15. A release without the function that forgets workspaces captures as torch
does.
Without it: 'unspecified launch failure' when graphs of mezzo and of `torch.compile` take turns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_forget_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)


def _renew_generator() -> None:
    """Give the current device's generator a new state with its seed.

    After a capture that failed, torch takes the old state for one of a running capture, and every
    random number of the process is an error.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _clean_up(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo what torch leaves behind where the end of a capture raises: it stops before its own cleaning."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # raised if the allocator already left the pool
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    _renew_generator()


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Return a context for a capture with its own cuBLAS workspace.

    Workspaces are forgotten before the capture, so that it allocates one in the graph's pool, and
    afterwards, so that no other code uses or frees that one. An exception of the captured code leaves
    as it is, although the end of such a capture raises one, too. Then the stream, the allocator and
    the generator are as before the capture.

    Args:
        graph: The graph to capture into.
        pool: Memory pool that it shares with other graphs, from `torch.cuda.graph_pool_handle()`.
        stream: The stream to capture; None: torch's stream for captures.
        capture_error_mode: `thread_local` lets other threads call what a capture forbids.
    """
    _forget_workspaces()
    pool = pool or torch.cuda.graph_pool_handle()
    before = torch.cuda.current_stream()
    reason: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            try:
                yield
            except BaseException as error:
                reason = error
                raise
    except RuntimeError:
        _clean_up(before, pool)
        if reason is not None:  # ending a capture that failed fails too, in words that do not help
            raise reason from None
        raise
    finally:
        _forget_workspaces()
