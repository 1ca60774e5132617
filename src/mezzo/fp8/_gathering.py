"""Gather sharded weights in FP8: one byte per number instead of two.

Every process rounds its shard before FSDP2 gathers it. One scale belongs to the whole weight, so the
processes first agree on the largest magnitude: one all-reduce for all weights, before each forward pass.
The gathered numbers are bit for bit those of gathering in half and converting afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mezzo._torch.autograd_engine import graph_task_id
from mezzo._torch.dynamo import hide_from_dynamo
from mezzo._torch.foreach import foreach_norm
from mezzo._torch.sharding import ShardedWeight, sharded_weights
from mezzo.fp8._gathered import GatheredWeight
from mezzo.fp8._numbers import E4M3
from mezzo.fp8._operands import make_operand
from mezzo.fp8._weights import HEADROOM


class _Gathering:
    """Converts one weight before and after FSDP2 gathers it."""

    def __init__(self, weight: ShardedWeight, owner: _Owner) -> None:
        self.weight = weight
        self.amax: Tensor | None = None
        """Largest magnitude over all shards, rounded to half; one number."""
        self.forward_pass = -1
        """Number of the forward pass that `amax` was measured for."""
        self._owner = owner
        # Kept, and written in place: the stream of FSDP2 that writes it is not the one that reads it.
        self._inverse: Tensor | None = None
        weight.convert(self._before, self._after)

    def __deepcopy__(self, memo: Any) -> _Gathering:
        return self  # a copy of a parameter or an optimizer is not gathered

    def __reduce__(self) -> Any:
        raise TypeError(
            "a parameter that is gathered in FP8 was pickled; save model.state_dict() and optimizer.state_dict() instead"
        )

    def _before(
        self, mesh: Any, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return the shard in FP8, as bytes: gloo does not know FP8."""
        amax = self._owner.current_amax(self)
        shard = self.weight.shard.detach()
        half = shard.new_zeros((self.weight.rows, *shard.shape[1:]), dtype=policy.param_dtype)
        half[: len(shard)].copy_(shard)
        operand = make_operand(half, amax=amax, transposed=False, headroom=HEADROOM)
        if self._inverse is None:  # not earlier: a model on the meta device gets its device after sharding
            self._inverse = shard.new_empty(())
        # `.data`: compiled code saves the number for the backward pass, which writes it again
        self._inverse.data.copy_(operand.inverse)
        return (operand.values.view(torch.uint8),), None

    def _after(
        self, gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[GatheredWeight, tuple[()]] | None:
        """Return the weight; with `out`, FSDP2 has written the FP8 numbers of the existing one."""
        if out is not None:
            return None
        assert self._inverse is not None
        rows = self.weight.param.shape[0]
        return GatheredWeight(gathered[0].view(E4M3)[:rows], self._inverse, dtype), ()


class _Owner:
    """Measures the weights of a model before each forward pass."""

    def __init__(self, half: torch.dtype) -> None:
        self._half = half
        self._running: nn.Module | None = None
        """The outermost module whose forward pass runs."""
        self._passes = 0
        self._measured: torch.cuda.Event | None = None

    @hide_from_dynamo("weights are measured before they are gathered; compile the blocks, not the whole model")
    def start(self, weights: Sequence[_Gathering], module: nn.Module, *_: Any) -> None:
        """Measure the weights of a module if it is the outermost one.

        A second call of the same module means that the first ended without `end`, by an interrupt.
        """
        if graph_task_id() != -1 or self._running not in (None, module):
            return  # recomputed in a backward pass, or inside of another module
        self._running = module
        self._passes += 1
        self._measure(weights)

    @hide_from_dynamo("weights are measured before they are gathered; compile the blocks, not the whole model")
    def end(self, module: nn.Module, *_: Any) -> None:
        """Note that the forward pass of a module ended."""
        if self._running is module and graph_task_id() == -1:
            self._running = None

    def current_amax(self, gathering: _Gathering) -> Tensor:
        """Return the largest magnitude of a weight for a gathering that starts now.

        A backward pass uses that of its forward pass. Weights that are gathered outside of both (`unshard()`), or
        ahead of their own forward pass, are measured here. All processes come to the same decision.
        """
        is_measured = self._running is not None and gathering.forward_pass == self._passes
        if gathering.amax is None or not (is_measured or graph_task_id() != -1):
            self._measure([gathering])
        elif self._measured is not None:  # on the stream of the forward pass
            torch.cuda.current_stream().wait_event(self._measured)
        assert gathering.amax is not None
        return gathering.amax

    @torch.no_grad()
    def _measure(self, weights: Sequence[_Gathering]) -> None:
        """Find the largest magnitude of each weight over all shards, with one all-reduce."""
        shards = [each.weight.shard.detach() for each in weights]
        filled = [shard for shard in shards if shard.numel()]
        norms = iter(foreach_norm(filled, float("inf")) if filled else ())
        nothing = torch.zeros((), device=shards[0].device)
        amaxes = torch.stack([next(norms) if shard.numel() else nothing for shard in shards])
        amaxes.nan_to_num_(nan=float("inf"), posinf=float("inf"))  # the maximum of gloo loses NaN
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=weights[0].weight.group)
        # Rounding keeps the order: this is the largest of the rounded numbers
        amaxes = amaxes.to(self._half).float()
        if amaxes.is_cuda:
            self._measured = torch.cuda.Event()
            self._measured.record()
        for place, each in enumerate(weights):
            each.amax, each.forward_pass = amaxes[place : place + 1], self._passes


def gather_in_fp8(model: nn.Module, weights: Iterable[Tensor], half: torch.dtype, modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 gather weights of a sharded model in FP8.

    Args:
        model: The model.
        weights: Sharded weights of linear layers, float32.
        half: The dtype that they are gathered in otherwise.
        modules: The modules that are gathered one at a time, and the model.
    """
    owner, records = _Owner(half), sharded_weights(model)
    gatherings = {id(weight): _Gathering(records[id(weight)], owner) for weight in weights}
    for module in modules:
        own = [gatherings[id(param)] for param in module.parameters() if id(param) in gatherings]
        if own:
            _watch(module, own, owner)


def _watch(module: nn.Module, weights: Sequence[_Gathering], owner: _Owner) -> None:
    # Before the hook in which FSDP2 gathers. No lambdas: Dynamo would compile them, with the break inside.
    module.register_forward_pre_hook(partial(owner.start, weights), prepend=True)
    module.register_forward_hook(owner.end, always_call=True)
