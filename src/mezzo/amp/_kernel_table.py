"""The kernels installed in this process.

A kernel is installed only for operators whose native autocast behaviour differs from a policy in use, once per process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mezzo._torch.kernel_library import OVERRIDE, remove_kernels
from mezzo.amp import _own_operators  # noqa: F401  its import registers kernels
from mezzo.amp._compiled import COMPILED, load_kernels
from mezzo.amp._fp8 import has_fp8
from mezzo.amp._kernels import make_kernel
from mezzo.amp._native import AUTOCAST_KEYS, native_behaviour
from mezzo.amp._ops import OPS, Op
from mezzo.amp._overloads import Signature, has_numbers, is_decided_by_dtypes, overloads_of, qualified
from mezzo.amp._plans import agrees_with_native
from mezzo.amp._policy import Policy
from mezzo.amp._state import use_compiled

_INSTALLED = ("installed in generation", "")


class KernelTable:
    """Installs kernels for policies, and removes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None
        self._policies: set[Policy] = set()
        self.installed: dict[tuple[str, str], Op] = {}
        """(device type, qualified overload) of every kernel of mezzo."""
        self._looked_for_compiled = False
        self.generation = 0
        """Counts uninstallations: a policy remembers in which generation its kernels were installed."""

    def install(self, policy: Policy, device_types: Sequence[str]) -> None:
        """Install a kernel for every operator that the policy treats differently from torch."""
        with self._lock:
            if policy in self._policies:
                policy._plans[_INSTALLED] = self.generation
                return
            if not self._looked_for_compiled:
                self._looked_for_compiled = True
                COMPILED.library = load_kernels()
                use_compiled(None if COMPILED.library is None else COMPILED.library.set_policy)
            for device_type in device_types:
                for op in OPS.values():
                    for overload in overloads_of(op):
                        self._install_one(policy, op, overload, device_type)
            self._policies.add(policy)
            policy._plans[_INSTALLED] = self.generation

    def _install_one(self, policy: Policy, op: Op, overload: Any, device_type: str) -> None:
        name = qualified(overload)
        if (device_type, name) in self.installed:
            return
        native = native_behaviour(op.name, name, device_type)
        only = op.overload_variant.get(overload._schema.overload_name)
        variants = op.variants if only is None else (only,)
        agrees = all(agrees_with_native(policy, op, variant, native, device_type) for variant in variants)
        if agrees and not has_fp8(policy, op.name):
            return
        if self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            kernel = make_kernel(overload, op, device_type)
            self._library.impl(name.removeprefix("aten::"), kernel, AUTOCAST_KEYS[device_type], **OVERRIDE)
            if COMPILED.library is not None:
                _cover(overload, op, device_type)
        self.installed[device_type, name] = op

    def uninstall(self) -> None:
        """Remove every kernel of mezzo; torch's own take their place."""
        with self._lock:
            if COMPILED.library is not None:
                COMPILED.library.uncover_all()
            if self._library is not None:
                remove_kernels(self._library)
            self._library = None
            self._policies.clear()
            self.installed.clear()
            self.generation += 1

    def are_installed(self, policy: Policy) -> bool:
        """Whether `install` has nothing left to do for a policy; cheap, because every region asks."""
        return policy._plans.get(_INSTALLED) == self.generation


def _cover(overload: Any, op: Op, device_type: str) -> None:
    """Put the compiled kernel above mezzo's Python one, unless the decision needs more than dtypes."""
    if not is_decided_by_dtypes(op, device_type):
        return
    signature = Signature(overload)
    slots = signature.slots[:1] if op.weights == "stay" else signature.slots
    dtype_slot = [a.name for a in overload._schema.arguments].index("dtype") if signature.takes_dtype else -1
    name, overload_name = overload._schema.name, overload._schema.overload_name
    COMPILED.library.cover(device_type, name, overload_name, list(slots), dtype_slot, has_numbers(op))


KERNELS = KernelTable()
