"""Calls in torch's words: its names and its order of arguments, translated into mezzo's.

mezzo's functions have Paddle's names. `GradScaler("cuda", init_scale=1024.0)` runs the same code as
`GradScaler(init_loss_scaling=1024.0)`, and `auto_cast("cuda", torch.bfloat16)` the same as
`auto_cast(device_type="cuda", dtype="bfloat16")`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from mezzo.amp.support import DEVICE_TYPES
from mezzo.devices import DeviceError, parse_device


def check_device_type(call: str, device: Any) -> str:
    """Return `cuda` or `cpu` for a device or its name; `gpu` means `cuda`.

    Args:
        call: The function, for the message.
        device: What the user gave.

    Raises:
        TypeError: It is neither a device nor a name.
        DeviceError: mezzo does not cast tensors there.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"{call}: the device is {device!r}; must be 'cuda', 'cpu' or a torch.device")
    try:
        return parse_device(device, DEVICE_TYPES).kind
    except DeviceError:
        places = " and ".join(DEVICE_TYPES)
        raise DeviceError(f"{call}({str(device)!r}): mezzo casts tensors on {places} only") from None


def is_device(value: Any) -> bool:
    """Return whether a value names a device that mezzo casts tensors on."""
    if not isinstance(value, (str, torch.device)):
        return False
    try:
        parse_device(value, DEVICE_TYPES)
    except DeviceError:
        return False
    return True


def names_device(text: str) -> bool:
    """Return whether torch knows a device of this name; mezzo may not cast tensors there."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def takes_torch_arguments(*order: str, **names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a method that can also be called in torch's words.

    Args:
        order: torch's arguments in its order. It applies if the first argument is a device.
        names: torch's names, and the method's names for the same.

    The method raises TypeError if an argument comes under both names, even with equal values.
    """

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        call = method.__qualname__.partition(".")[0]
        own_order = list(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            if args and is_device(args[0]):
                args, kwargs = (), _by_name(call, order, args, kwargs)
            if kwargs and not names.keys().isdisjoint(kwargs):
                kwargs = _translated(call, names, own_order[: len(args)], kwargs)
            method(self, *args, **kwargs)

        return run

    return decorate


def _by_name(call: str, order: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return positional arguments in torch's order under torch's names, with the others."""
    if len(args) > len(order):
        raise TypeError(
            f"{call}: after a device, at most {len(order) - 1} positional arguments: {', '.join(order[1:])}"
        )
    found = dict(zip(order, args, strict=False))
    if twice := sorted(found.keys() & kwargs.keys()):
        raise TypeError(f"{call}: {twice[0]} came by position and by name: give it once")
    return {**found, **kwargs}


def _translated(call: str, names: dict[str, str], positional: list[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with torch's names replaced by the method's."""
    for theirs, ours in names.items():
        if theirs in kwargs and (ours in kwargs or ours in positional):
            raise TypeError(f"{call}: give {ours} or {theirs}, not both: they are two names of one argument")
    return {names.get(name, name): value for name, value in kwargs.items()}
