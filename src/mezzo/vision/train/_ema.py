"""The exponential moving average of a model's weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mezzo._torch.foreach import foreach_lerp_
from mezzo.dtypes import HALF_DTYPES
from mezzo.model.saved_state import check_tensors, mapping, part, whole_number
from mezzo.optim import copy_all, mark_in_sync, master_of, publish, stored_master


class Ema:
    """The exponential moving average of a model's weights.

    It often evaluates better than the weights themselves.

    Parameters are averaged, from their float32 masters if the model was decorated; buffers are
    copied. There is no host synchronisation.

    Args:
        model: On its device, not wrapped for distributed training. Call `decorate` before.
        decay: Share of the average that an update keeps. Update n (from 0) uses
            min(decay, (1 + n) / (10 + n)), so that the random initial weights soon lose influence.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9998) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: must be from 0 to below 1, such as 0.9998")
        self.decay = decay
        self.updates = 0
        self._tensors: dict[str, Tensor] = dict([*model.named_parameters(), *model.named_buffers()])
        self._averaged = [name for name, p in model.named_parameters() if p.is_floating_point()]
        self._copied = [name for name in self._tensors if name not in set(self._averaged)]
        self._shadows = {name: _wide(_source(tensor)).clone() for name, tensor in self._tensors.items()}
        self._is_applied = False

    def next_decay(self) -> float:
        """Return the decay of the next update."""
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; call it after each step."""
        if self._is_applied:
            raise RuntimeError("Ema.update() inside applied(): the model holds the average; leave the region first")
        weight = 1 - self.next_decay()
        averaged = [_wide(_source(self._tensors[name])) for name in self._averaged]
        if averaged:
            foreach_lerp_([self._shadows[name] for name in self._averaged], averaged, weight)
        copy_all(
            [self._shadows[name] for name in self._copied], [_source(self._tensors[name]) for name in self._copied]
        )
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model inside the `with` block.

        Restore the model bit-exactly after it.

        Changes of weights and buffers inside the block are undone.
        """
        if self._is_applied:
            raise RuntimeError("Ema.applied() is active already; leave the region first")
        before = [(tensor.detach().clone(), _clone(stored_master(tensor))) for tensor in self._tensors.values()]
        self._is_applied = True
        try:
            self._apply()
            yield
        finally:
            self._put_back(before)
            self._is_applied = False

    @torch.no_grad()
    def _apply(self) -> None:
        """Put the average into the tensors of the model and their masters."""
        pairs = [(tensor, self._shadows[name]) for name, tensor in self._tensors.items()]
        copy_all(*_columns([(tensor, shadow) for tensor, shadow in pairs if stored_master(tensor) is None]))
        publish(*_columns([(tensor, shadow) for tensor, shadow in pairs if stored_master(tensor) is not None]))

    @torch.no_grad()
    def _put_back(self, before: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Restore the tensors of the model and their masters."""
        tensors = list(self._tensors.values())
        kept = [(tensor, stored_master(tensor), was) for tensor, (_, was) in zip(tensors, before, strict=True)]
        with_masters = [(tensor, now, was) for tensor, now, was in kept if now is not None and was is not None]
        copy_all(tensors, [value for value, _ in before])
        copy_all([now for _, now, _ in with_masters], [was for _, _, was in with_masters])
        # Otherwise the half copies would count as edits by the user.
        mark_in_sync([tensor for tensor, _, _ in with_masters])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors are not copies."""
        return {"updates": self.updates, "values": dict(self._shadows)}

    def check_state_dict(self, state: Any) -> None:
        """Raise ValueError unless names, shapes, dtypes and updates of a state fit this model."""
        with part("the EMA does not fit the model"):
            values = mapping(state)
            check_tensors(values["values"], self._shadows, lambda shadow: shadow.dtype)
            whole_number("updates", values["updates"], 2**62)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint; nothing changes if it does not fit.

        Raises:
            ValueError: Names, shapes or dtypes differ from the model's.
        """
        self.check_state_dict(state)
        for name, shadow in self._shadows.items():
            shadow.copy_(state["values"][name])
        self.updates = state["updates"]


def _source(tensor: Tensor) -> Tensor:
    """Return the master of a tensor, or the tensor itself if it has none."""
    master = master_of(tensor)
    return tensor.detach() if master is None else master


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _columns(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [one for one, _ in pairs], [other for _, other in pairs]
