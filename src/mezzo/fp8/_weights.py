"""FP8 copies of weights, kept beside them: made once after each change, by the optimizer's update where it can."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.fp8._numbers import E4M3, amax_of
from mezzo.fp8._operands import AmaxHistory, Operand, _by_triton, make_operand
from mezzo.fp8._recipe import MULTIPLE, Fp8Recipe

HEADROOM = 2.0
"""How much a weight may grow in one step before it is cut off: its scale is made from the step before."""

INVERSE, AMAX, NEWEST = 0, 1, 2
"""Places in `WeightCopies.state`."""


class WeightCopies:
    """A weight and its transpose in e4m3, one scale for both, and what their next scale is made from."""

    def __init__(self, weight: Tensor) -> None:
        self.device = weight.device
        with torch.inference_mode(False):  # a first call for inference must not make tensors that training cannot write
            self.values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
            self.transposed = self.values.new_empty(weight.shape[::-1])
            self.state = torch.zeros(4, device=weight.device)
            """float32: what undoes the scale, the amax that the next scale is made from, the amax that an update collects."""
        self._seen: tuple[int, int] | None = None
        self.histories: dict[str, AmaxHistory] = {}
        """Delayed scaling of what meets this weight: its 'input' and the 'gradient' of its output."""

    def note(self, weight: Tensor) -> None:
        """Take the copies for those of the weight as it is now."""
        self._seen = (weight._version, weight.data_ptr())

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copies are those of the weight as it is."""
        return self._seen == (weight._version, weight.data_ptr())

    def forget(self) -> None:
        """Have the copies made anew when they are asked for."""
        self._seen = None

    def operand(self, weight: Tensor) -> Operand:
        """Return the copies, made anew if the weight has changed since."""
        if not self.is_of(weight):
            self.renew(weight)
        inverse = self.state[INVERSE]
        return Operand(self.values, inverse, self.transposed, inverse)

    @torch.no_grad()
    def renew(self, weight: Tensor) -> None:
        """Make the copies from the weight as it is, whatever they were."""
        amax = amax_of(weight)
        made = make_operand(weight.detach().contiguous(), amax=amax.reshape(1), headroom=HEADROOM)
        self.values.copy_(made.values)  # where they are: a captured step knows their addresses
        self.transposed.copy_(made.transposed)
        nothing = torch.zeros_like(amax)
        self.state.copy_(torch.stack((made.inverse, amax, nothing, nothing)))
        self.note(weight)

    def history(self, role: str, length: int) -> AmaxHistory:
        """Return the history of what meets this weight."""
        found = self.histories.get(role)
        if found is None or len(found.amaxes) != length:
            with torch.inference_mode(False):
                found = self.histories[role] = AmaxHistory(length, self.device)
        return found


MASTER_HOME = "_mezzo_master"
"""Where a half parameter has its float32 master (`mezzo.optim`). Copies are kept of such parameters alone: what others have
in their memory may change without a trace, as FSDP does when it gathers weights."""

_copies = WeakIdKeyDictionary()
_at: dict[int, weakref.ref[Tensor]] = {}
"""Weights by address: in a compiled graph the parameter arrives as another object."""
_made = 0


def count_of_copies() -> int:
    """Return how often a weight got copies: while it is the same, whoever had none has none."""
    return _made


def copies_of(weight: Tensor) -> WeightCopies | None:
    """Return the copies that are kept of a weight, None if there are none; a parameter as it stands, or an alias of one."""
    found = _copies.get(weight)
    if found is None:
        at = _at.get(weight.data_ptr())
        owner = None if at is None else at()
        if owner is not None and _is_alias(owner, weight):
            found = _copies.get(owner)
    fits = found is not None and found.device == weight.device and found.values.shape == weight.shape
    return found if fits else None


def _is_alias(owner: Tensor, weight: Tensor) -> bool:
    # By strides too: a square weight and its transpose are at one address and of one shape.
    same_place = owner.data_ptr() == weight.data_ptr()
    return same_place and owner.shape == weight.shape and owner.stride() == weight.stride()


def copies_for_update(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight that the kernel of an update can write; None where they are made by the next forward."""
    found = copies_of(weight)
    if found is None or not _by_triton(weight) or any(size % MULTIPLE for size in weight.shape):
        return None
    return found


def keep_copies(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight; a parameter that has a master gets some, anything else has none."""
    global _made
    found = copies_of(weight)
    is_ours = isinstance(weight, nn.Parameter) and hasattr(weight, MASTER_HOME) and not weight.is_inference()
    if not is_ours or (found is not None and found.is_of(weight)):
        return found
    if found is None:
        found = WeightCopies(weight)
        _copies[weight] = found
        _made += 1
    for address in [address for address, owner in _at.items() if owner() is None]:
        del _at[address]
    _at[weight.data_ptr()] = weakref.ref(weight)
    return found


def renew_copies(weights: Iterable[Tensor]) -> None:
    """Make the copies of those weights anew that have some: after `weight.data.copy_(x)`, which leaves no trace."""
    for weight in weights:
        found = copies_of(weight)
        if found is not None:
            found.renew(weight)


def weight_operand(weight: Tensor, recipe: Fp8Recipe) -> Operand:
    """Return a weight in FP8: the copies kept beside it, or made for this call."""
    kept = keep_copies(weight) if recipe.granularity == "tensor" else None
    if kept is not None:
        return kept.operand(weight)
    headroom = 1.0 if recipe.granularity == "row" else HEADROOM  # as in the copies: the same numbers either way
    return make_operand(weight.detach().contiguous(), by_row=recipe.granularity == "row", headroom=headroom)


def history_of(weight: Tensor, role: str, recipe: Fp8Recipe) -> AmaxHistory | None:
    """Return the history by which what meets a weight is scaled; None: by itself."""
    if recipe.scaling != "delayed":
        return None
    kept = keep_copies(weight)
    return None if kept is None else kept.history(role, recipe.history)
