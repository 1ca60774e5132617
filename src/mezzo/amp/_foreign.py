"""Finds kernels of mezzo that another library has replaced on the same dispatch key."""

from __future__ import annotations

import os
from typing import Any

import torch

from mezzo.amp._kernel_table import KERNELS
from mezzo.amp._state import AutocastState, read_state, set_policy, write_state

#: Set MEZZO_DEBUG=1 to check at the entry of every region.
CHECKS_ON_ENTRY = os.environ.get("MEZZO_DEBUG") == "1"

_EXAMPLES = {"int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "Scalar": 1.0, "bool": False, "str": "mean"}


class _Reached(Exception):  # a signal, not an error
    """A kernel of mezzo asked for the policy."""


class _Probe:
    """Used in place of a policy: if it is asked for a plan, the call has reached a kernel of mezzo."""

    dtype = torch.float16
    fp8 = None

    @property
    def _plans(self) -> Any:
        raise _Reached


def replaced_kernels() -> list[str]:
    """Return the operators whose kernel was replaced, each as `aten::name (device type)`."""
    usable = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    replaced = []
    for device_type, name in KERNELS.installed:
        if device_type in usable and not _reaches_mezzo(name, device_type):
            replaced.append(f"{name} ({device_type})")
    return replaced


def raise_if_replaced() -> None:
    """Raise RuntimeError if another library has replaced a kernel of mezzo."""
    replaced = replaced_kernels()
    if replaced:
        raise RuntimeError(
            f"another library replaced {len(replaced)} autocast kernel(s) of mezzo: {', '.join(replaced[:5])}; its "
            "precision rules, not auto_cast's, hold for them. Import it before the first auto_cast, or remove it"
        )


def _reaches_mezzo(name: str, device_type: str) -> bool:
    packet, _, overload_name = name.removeprefix("aten::").partition(".")
    overload = getattr(getattr(torch.ops.aten, packet), overload_name or "default")
    arguments = overload._schema.arguments
    args = [_example(argument, device_type) for argument in arguments if not argument.kwarg_only]
    kwargs = {a.name: _keyword_example(a, device_type) for a in arguments if a.kwarg_only and not a.has_default_value()}
    before = read_state()
    write_state(AutocastState(None, None, device_type == "cuda", torch.float16, device_type == "cpu", torch.float16))
    set_policy(_Probe())
    try:
        overload(*args, **kwargs)
    except _Reached:
        return True
    except Exception:  # noqa: BLE001  # a foreign kernel may raise anything on the example arguments
        return False
    finally:
        write_state(before)
    return False


def _keyword_example(argument: Any, device_type: str) -> Any:
    return torch.float32 if argument.name == "dtype" else _example(argument, device_type)


def _example(argument: Any, device_type: str) -> Any:
    """Return a value of the argument's type; no operator ever runs on it."""
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    tensor = torch.ones(1, 1, device=device_type)
    if kind == "Tensor":
        return tensor
    if kind.startswith("List[Tensor]"):
        return [tensor, tensor]
    if kind.startswith("List[Optional"):
        return [tensor]
    if kind.startswith("List["):
        return [_EXAMPLES.get(kind[5:-1], 1)]
    return _EXAMPLES.get(kind, 1)
