"""Several processes, as `torchrun` starts them: who am I, the wrapper of a model, and what only one of them does."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
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
from mezzo.fp8 import renew_copies
from mezzo.model.watchdog import explained_start, explained_waiting, is_timeout, start_watch, stop_watch
from mezzo.optim import master_of, publish

DIST_TIMEOUT_S = 1800.0
"""How long a process waits for the others unless an option says otherwise."""
_NCCL_AFTER_S = 60.0  # later than our own limit, which names who is missing

T = TypeVar("T")
_decisions = itertools.count()


class FirstProcessFailed(MezzoError):
    """The first process cannot begin, so no other can."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among all of a run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints lines."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


# Groups are kept until the process ends. DDP's reducer holds one too: were its reference the last, the group would go down
# while Python's lock is held, and wait for a thread of gloo's that waits for the lock (pytorch issue 56297; seen once, on a
# busy machine). Python's own reference lets the lock go first.
_left: list[object] = []
atexit.register(_left.clear)
_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@contextmanager
def join_world(device: str = "auto", timeout_s: float = DIST_TIMEOUT_S) -> Iterator[World]:
    """Yield this process's place; leave the process group at the end. See `enter_world`."""
    world = enter_world(device, timeout_s=timeout_s)
    with explained_waiting():
        yield world
    if world.size > 1:
        stop_watch()
        dist.destroy_process_group()  # not after an error: others may wait in it, and the launcher ends them


def _leave_at_exit() -> None:
    """Leave the process group, but not after an error: others may wait in it, and the launcher ends them."""
    if getattr(sys, "last_value", None) is not None:
        return
    # A script's variables live on until there is no interpreter: what their wrappers hold of the group must not.
    for wrapper in list(_wrapped):
        for name in ("reducer", "logger", "process_group"):
            vars(wrapper).pop(name, None)
    if dist.is_initialized():
        stop_watch()
        dist.destroy_process_group()


def enter_world(
    device: str = "auto",
    setting: str = "--device {}",
    *,
    leave_at_exit: bool = False,
    timeout_s: float = DIST_TIMEOUT_S,
) -> World:
    """Return this process's place; processes that `torchrun` started are connected, GPUs by NCCL and CPUs by gloo.

    Without `torchrun` the world is this process; a process group that is there already is used.

    Args:
        device: See `mezzo.devices.find_device`.
        setting: How messages write the choice of a device.
        leave_at_exit: A group that is made here is left when the process ends, unless an error ended it.
        timeout_s: How long a process waits for the others, in seconds; of a group that is made here.

    Raises:
        DeviceError: There is no such device.
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
    """Return, in all processes, what the first one decides; a refusal there is one in all of them. All call it.

    Args:
        world: The processes.
        decide: Called in the first process; returns what JSON can hold.

    Raises:
        MezzoError: Whatever `decide` raises; in other processes FirstProcessFailed, with its message.
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
        raise RunError("the first process ended before it began; its message says why") from error
    if "refused" in found:
        failure = FirstProcessFailed(f"the first process cannot begin: {found['refused']}")
        failure.exit_code = found["exit_code"]
        raise failure
    decided: T = found["decision"]
    return decided


def use_sync_batch_norm(model: nn.Module, world: World) -> tuple[nn.Module, str | None]:
    """Return the model with batch norms over all processes, and a notice where that cannot be."""
    if world.size == 1:
        return model, None
    if world.device.type != "cuda":
        return model, "synchronised batch norm needs CUDA; on CPUs each process normalises its own batch"
    return nn.SyncBatchNorm.convert_sync_batchnorm(model), None


@torch.no_grad()
def share_buffers(model: nn.Module, world: World) -> None:
    """Give every process the running statistics of the first, as a checkpoint has them: each has seen its own batches."""
    if world.size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@torch.no_grad()
def share_state(model: nn.Module, world: World) -> None:
    """Give every process the weights and buffers of the first; of half weights, their masters."""
    if world.size == 1:
        return
    for param in model.parameters():
        master = master_of(param)
        if master is None:
            dist.broadcast(param, 0)
        else:
            dist.broadcast(master, 0)
            publish([param], [master])
    renew_copies(model.parameters())
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def wrap(model: nn.Module, world: World, *, is_shared: bool = False) -> nn.Module:
    """Return the model as all processes train it: gradients are averaged.

    The set of parameters that get a gradient is the same in every step, so DDP learns it once: some networks carry layers
    that are never executed.

    Args:
        model: Decorated already.
        world: The processes.
        is_shared: All have the same weights. Else DDP sends those of the first round: half ones, and masters become as coarse.
    """
    if world.size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model, device_ids=ids, static_graph=True, gradient_as_bucket_view=False, init_sync=not is_shared
    )
    _wrapped.add(wrapped)
    return wrapped
