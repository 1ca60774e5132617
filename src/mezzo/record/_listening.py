"""Starting and stopping a recording: who listens in this thread."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from mezzo._torch.autograd_engine import number_of_node
from mezzo._torch.modes import current_dispatch_mode
from mezzo.record._kernel_runs import KernelListener
from mezzo.record._operator_stats import OperatorStats
from mezzo.record._recorder import Recording, RecordingMode


class _Active(threading.local):
    """The recording of one thread."""

    recording: Recording | None = None


_active = _Active()


def start_listening(listener: KernelListener) -> None:
    if _active.recording is None:
        recording = Recording()
        recording.install()
        _active.recording = recording
    _active.recording.add(listener)


def stop_listening(listener: KernelListener) -> None:
    recording = _active.recording
    assert recording is not None, "a recording is stopped by the thread that started it"
    if recording.listeners == [listener]:
        recording.uninstall()
        _active.recording = None
    recording.remove(listener)


def abandon(listener: KernelListener) -> None:
    """Remove a listener of a recording that could not end; its modes stay until the next recording of this thread ends."""
    if _active.recording is not None:
        _active.recording.remove(listener)


def counts_operators() -> bool:
    """Whether operator statistics are collected in this thread."""
    recording = _active.recording
    return recording is not None and any(isinstance(listener, OperatorStats) for listener in recording.listeners)


def has_foreign_mode() -> bool:
    """Whether the innermost dispatch mode of this thread is foreign: tracing, fake tensors, another tool."""
    mode = current_dispatch_mode()
    return mode is not None and not isinstance(mode, RecordingMode)


@contextmanager
def listening(*listeners: KernelListener, inside: nn.Module | None = None) -> Iterator[None]:
    """Pass the kernels that run inside, in this thread and in its backward, to listeners.

    Args:
        listeners: Receive the kernels.
        inside: A module whose forward is in progress when the recording starts; paths are relative to it.
    """
    with ExitStack() as stack:
        for listener in listeners:
            start_listening(listener)
            stack.callback(stop_listening, listener)
        if inside is not None and inside not in modules_in_progress():
            recording = _active.recording
            assert recording is not None, "a listener was started"
            recording.locator.enter_module(inside, ())
            stack.callback(recording.locator.leave_module, inside, (), None)
        yield


def modules_in_progress() -> list[nn.Module]:
    """Return the modules whose forward runs in this thread, the outermost first; none without a recording."""
    return [] if _active.recording is None else list(_active.recording.locator.places.current.modules)


def node_origins(nodes: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Return module, line and torch-level call of autograd nodes that were made in this thread's recording."""
    known = {} if _active.recording is None else _active.recording.locator.nodes
    return [known.get(number_of_node(node), ("", "", "")) for node in nodes]
