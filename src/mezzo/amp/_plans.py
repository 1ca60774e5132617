"""What a kernel does with an operator variant under a policy, and whether torch already does the same."""

from __future__ import annotations

from typing import Any

import torch

from mezzo.amp import _cpu
from mezzo.amp._carried import carrier_of, needs_no_casts, replaces_a_float32_copy
from mezzo.amp._native import Native, native_behaviour
from mezzo.amp._ops import HEAVY, NO_CPU_HALF_KERNEL, PIECES, VARIANTS, Op
from mezzo.amp._overloads import overloads_of, qualified
from mezzo.amp._policy import CASTABLE, Decision, Policy


class CastPlan:
    """What a kernel does for one variant under one policy; made at the first call."""

    __slots__ = ("actions", "border_only", "carrier", "defer", "is_float32_inside", "leaves_alone", "spare_scalars")

    def __init__(self, policy: Policy, op: Op, variant: str, native: Native, device_type: str) -> None:
        gray = not (variant in policy.white or variant in policy.black or variant in policy.inside)
        agrees = agrees_with_native(policy, op, variant, native, device_type)
        self.defer = agrees and native is not Native.NONE
        """torch's own kernel does the right thing, and caches weight casts."""
        promotes = policy.decide(variant, (policy.dtype,)).dtype is not policy.decide(variant, (torch.float32,)).dtype
        self.leaves_alone = agrees and native is Native.NONE and promotes
        """The operator promotes by itself, as the policy says; the kernel was installed for another policy."""
        self.spare_scalars = gray and not op.opaque
        """0-dim tensors neither decide nor are cast, like Python numbers: a float32 loss stays float32 at O2."""
        self.border_only = _computes_in_float32(policy, variant, device_type)
        """CPU: inputs and outputs are half, the arithmetic is float32."""
        self.carrier = carrier_of(variant, device_type)
        """Carries out float32 arithmetic on half inputs without a float32 copy; None if nothing does."""
        self.is_float32_inside = needs_no_casts(variant, device_type)
        """torch's own kernel computes in float32 on half inputs."""
        self.actions: dict[Any, Decision | None] = {}
        """By input dtypes: the decision, or None if the call is right as it is."""

    def decide(self, policy: Policy, variant: str, key: Any) -> Decision | None:
        """Return the action for input dtypes, and remember it."""
        dtypes: tuple[torch.dtype, ...] = key if isinstance(key, tuple) else (key,)
        decision = policy.decide(variant, dtypes)
        unchanged = decision.compute is decision.dtype and not (self.border_only and decision.compute is policy.dtype)
        floats = [dtype for dtype in dtypes if dtype in CASTABLE]  # labels and lengths are never cast
        is_right = unchanged and all(dtype is decision.compute for dtype in floats)
        as_it_is = self.leaves_alone or decision.compute is None or is_right
        self.actions[key] = None if as_it_is else decision
        return self.actions[key]


def agrees_with_native(policy: Policy, op: Op, variant: str, native: Native, device_type: str) -> bool:
    """Whether torch's own autocast already does what the policy says, so that no kernel is needed."""
    low, fp32 = policy.dtype, torch.float32
    for_half, for_fp32 = policy.decide(variant, (low,)), policy.decide(variant, (fp32,))
    if for_half.dtype is None:
        return False
    if for_half.compute is not for_half.dtype or for_fp32.compute is not for_fp32.dtype:
        return False
    if for_half.compute is low and _computes_in_float32(policy, variant, device_type):
        return False
    if for_half.dtype is for_fp32.dtype:
        if for_half.dtype is fp32 and replaces_a_float32_copy(variant, device_type):
            return False
        if native is Native.NONE and for_half.dtype is fp32:
            return _pieces_are_float32(policy, variant, device_type)
        return native is (Native.LOW if for_half.dtype is low else Native.FP32)
    return native is Native.PROMOTE or (native is Native.NONE and not op.opaque)


def _computes_in_float32(policy: Policy, variant: str, device_type: str) -> bool:
    """Whether a half variant has half inputs and outputs but float32 arithmetic on a device type."""
    if device_type != "cpu":
        return False
    return variant in NO_CPU_HALF_KERNEL or (variant in HEAVY and _cpu.emulates(policy))


def _pieces_are_float32(policy: Policy, variant: str, device_type: str) -> bool:
    """Whether torch's own autocast makes a composite float32 because it makes its pieces float32."""
    pieces = [(VARIANTS[piece], piece) for piece in PIECES.get(variant, ())]
    return bool(pieces) and all(
        piece in policy.black and native_behaviour(op.name, qualified(overload), device_type) is Native.FP32
        for op, piece in pieces
        for overload in overloads_of(op)
    )
