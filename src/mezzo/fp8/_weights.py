"""FP8 copies of weights, kept beside them: made once after each change, by the optimizer's update where it can."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.fp8._numbers import E4M3, amax_of, scale_for
from mezzo.fp8._operands import AmaxHistory, Operand, make_operand
from mezzo.fp8._recipe import Fp8Recipe

HEADROOM = 2.0
"""How much a weight may grow in one step before it is cut off: its scale is made from the step before."""

INVERSE, AMAX, NEWEST = 0, 1, 2
"""Places in `WeightCopies.state`."""


class WeightCopies:
    """A weight and its transpose in e4m3, one scale for both, and what their next scale is made from."""

    def __init__(self, weight: Tensor) -> None:
        self.device = weight.device
        self.values = torch.empty_like(weight, dtype=E4M3, requires_grad=False, memory_format=torch.contiguous_format)
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

    def operand(self, weight: Tensor) -> Operand:
        """Return the copies, made anew if the weight has changed since."""
        if not self.is_of(weight):
            self._make(weight)
        inverse = self.state[INVERSE]
        return Operand(self.values, inverse, self.transposed, inverse)

    @torch.no_grad()
    def _make(self, weight: Tensor) -> None:
        amax = amax_of(weight)
        made = make_operand(weight.detach().contiguous(), amax=amax.reshape(1), headroom=HEADROOM)
        self.values.copy_(made.values)  # where they are: a captured step knows their addresses
        self.transposed.copy_(made.transposed)
        self.state[INVERSE] = 1.0 / scale_for(amax, E4M3, HEADROOM)
        self.state[AMAX] = amax
        self.note(weight)

    def history(self, role: str, length: int) -> AmaxHistory:
        """Return the history of what meets this weight."""
        found = self.histories.get(role)
        if found is None or len(found.amaxes) != length:
            found = self.histories[role] = AmaxHistory(length, self.device)
        return found


_copies = WeakIdKeyDictionary()
_at: dict[int, weakref.ref[Tensor]] = {}
"""Weights by address: in a compiled graph the parameter arrives as another object."""


def copies_of(weight: Tensor) -> WeightCopies | None:
    """Return the copies that are kept of a weight, None if there are none; a parameter as it stands, or an alias of one."""
    found = _copies.get(weight)
    if found is None:
        at = _at.get(weight.data_ptr())
        owner = None if at is None else at()
        if owner is not None and owner.data_ptr() == weight.data_ptr() and owner.shape == weight.shape:
            found = _copies.get(owner)
    return found if found is None or found.device == weight.device else None


def keep_copies(weight: Tensor) -> WeightCopies | None:
    """Return the copies of a weight; a parameter gets some, anything else is no weight that comes again."""
    found = copies_of(weight)
    if found is not None or not isinstance(weight, nn.Parameter):
        return found
    for address in [address for address, owner in _at.items() if owner() is None]:
        del _at[address]
    found = WeightCopies(weight)
    _copies[weight] = found
    _at[weight.data_ptr()] = weakref.ref(weight)
    return found


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
