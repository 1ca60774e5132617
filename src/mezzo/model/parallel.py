"""Processes that `torchrun` starts: rank and device, the DDP wrapper, shared decisions and weights."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mezzo._torch.process_groups import default_store
from mezzo.devices import find_device
from mezzo.errors import MezzoError, RunError
from mezzo.model.watchdog import explained_start, explained_waiting, is_timeout, start_watch, stop_watch
from mezzo.optim import share_weights

DIST_TIMEOUT_S = 1800.0
"""Default number of seconds that a process waits for the others."""
_NCCL_AFTER_S = 60.0  # later than the watchdog, which names the missing ranks

T = TypeVar("T")
_decisions = itertools.count()


class FirstProcessFailed(MezzoError):
    """The first process cannot start the run, so the other processes stop too."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, the number of processes, and the device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints lines."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all processes; None with one process."""
        return dist.group.WORLD if self.size > 1 else None

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


# This list keeps process groups until the process ends. DDP's reducer holds a reference too. If
# that were the last one, the group would be destroyed while the GIL is held, and would wait for a
# gloo thread that waits for the GIL (pytorch issue 56297; seen once, on a busy machine). Releasing
# the reference from Python drops the GIL first.
_left: list[object] = []
_GLOO_REST_S = 0.1
atexit.register(_left.clear)
_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@contextmanager
def join_world(device: str = "auto", timeout_s: float = DIST_TIMEOUT_S) -> Iterator[World]:
    """Yield the World of this process; leave the process group at the end. See `enter_world`."""
    world = enter_world(device, timeout_s=timeout_s)
    with explained_waiting():
        yield world
    if world.size > 1:
        _leave()  # not after an error: others may wait in the group; the launcher ends them


def _leave() -> None:
    """Destroy the process group, and let gloo's threads end their work.

    A thread of gloo frees the tensors of its last message some time after the message is complete, and
    needs the GIL for it. A group that somebody still holds (a device mesh, DDP) lives on after it was
    destroyed, with its threads. If the interpreter goes down while such a thread waits for the GIL, Python
    ends the thread, and C++ aborts the process: 3 of 8 runs on a busy machine, none with this rest.
    """
    stop_watch()
    is_gloo = dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if is_gloo:
        time.sleep(_GLOO_REST_S)


def _leave_at_exit() -> None:
    """Leave the process group; after an error do nothing: the launcher ends waiting processes."""
    if getattr(sys, "last_value", None) is not None:
        return
    # A script's variables live until the interpreter ends; the group must not live that long, so
    # remove the references that DDP wrappers hold.
    for wrapper in list(_wrapped):
        for name in ("reducer", "logger", "process_group"):
            vars(wrapper).pop(name, None)
    if dist.is_initialized():
        _leave()


def enter_world(
    device: str = "auto",
    setting: str = "--device {}",
    *,
    leave_at_exit: bool = False,
    timeout_s: float = DIST_TIMEOUT_S,
) -> World:
    """Return the World of this process; connect processes that `torchrun` started.

    GPUs are connected by NCCL, CPUs by gloo. Without `torchrun` the world has one process. An
    existing process group is used.

    Args:
        device: See `mezzo.devices.find_device`.
        setting: Format of the device choice in error messages.
        leave_at_exit: Leave a group that this call created when the process ends, unless it ends
            with an error.
        timeout_s: Seconds that a process waits for the others, in a group that this call creates.

    Raises:
        DeviceError: The device does not exist.
        RunError: Not all processes started in time.
    """
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = find_device(device, setting, local_rank if size > 1 else None)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), chosen)
    if size == 1:
        return World(0, 1, chosen)
    is_nccl = chosen.type == "cuda"
    with explained_start(size, timeout_s, speaks=os.environ.get("RANK") == "0"):
        if is_nccl:
            timeout = timedelta(seconds=timeout_s + _NCCL_AFTER_S)
            dist.init_process_group("nccl", timeout=timeout, device_id=chosen)
        else:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    _left.append(dist.group.WORLD)
    if leave_at_exit:
        atexit.register(_leave_at_exit)
    world = World(dist.get_rank(), dist.get_world_size(), chosen)
    start_watch(_store(), world.rank, world.size, timeout_s, ends_process=is_nccl)
    return world


def _store() -> Any:
    return default_store()


def decide_first(world: World, decide: Callable[[], T]) -> T:
    """Call `decide` in the first process and return its result in all processes.

    Every process must call this function. If `decide` raises in the first process, all processes
    raise.

    Args:
        world: The processes.
        decide: Returns a value that JSON can represent.

    Raises:
        MezzoError: `decide` raised it; the other processes raise FirstProcessFailed with its
            message.
    """
    if world.size == 1:
        return decide()
    store, key = _store(), f"mezzo/decision/{next(_decisions)}"
    if world.is_first:
        try:
            decision = decide()
        except MezzoError as error:
            store.set(key, json.dumps({"refused": str(error), "exit_code": error.exit_code}))
            raise
        store.set(key, json.dumps({"decision": decision}))
        return decision
    try:
        found = json.loads(store.get(key))
    except RuntimeError as error:
        if is_timeout(error):
            raise
        raise RunError("the first process ended before the run started; see its message") from error
    if "refused" in found:
        failure = FirstProcessFailed(f"the first process cannot start the run: {found['refused']}")
        failure.exit_code = found["exit_code"]
        raise failure
    decided: T = found["decision"]
    return decided


def use_sync_batch_norm(model: nn.Module, world: World) -> tuple[nn.Module, str | None]:
    """Return the model with synchronised batch norms; on CPUs the same model and a notice."""
    if world.size == 1:
        return model, None
    if world.device.type != "cuda":
        return model, "synchronised batch norm needs CUDA; on CPUs each process normalises its own batch"
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), None


@torch.no_grad()
def share_buffers(model: nn.Module, world: World) -> None:
    """Copy the running statistics of the first process to all: each has seen its own batches."""
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def share_state(model: nn.Module, world: World) -> None:
    """Copy the weights and buffers of the first process to all; half weights by their masters."""
    if world.size > 1:
        share_weights(model)


def wrap(model: nn.Module, world: World, *, is_shared: bool = False) -> nn.Module:
    """Return the model wrapped in DDP, which averages gradients; with one process the model itself.

    The same parameters get a gradient in every step, so DDP uses a static graph. This permits
    networks with layers that are never executed.

    Args:
        model: The network, after `decorate`.
        world: The processes.
        is_shared: All processes have the same weights already. Otherwise DDP broadcasts the weights
            of the first process; for half weights that loses the precision of the masters.
    """
    if world.size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=ids, static_graph=True, gradient_as_bucket_view=False, init_sync=not is_shared
    )
    _wrapped.add(wrapped)
    return wrapped
