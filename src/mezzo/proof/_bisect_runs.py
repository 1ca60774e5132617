"""The runs of a bisection: copies of one model, trained from the same start on one batch, against float32."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mezzo import amp
from mezzo._arguments import check_at_least
from mezzo._torch.layers import DropoutNd
from mezzo._torch.pytree import tree_leaves, tree_map
from mezzo.amp import first_and_last, is_excluded
from mezzo.dtypes import HALF_DTYPES, LEVELS, dtype_name, parse_half_dtype, parse_level
from mezzo.errors import unknown_choice
from mezzo.fp8 import Fp8Recipe, recipe_for
from mezzo.precision import Precision
from mezzo.record import OperatorStats
from mezzo.trial import call_model, random_states_kept, seed_all

SEED = 0
BY = ("modules", "ops")
METRICS = ("loss", "finite", "output")
SMALL_LOSS = 0.01
"""Losses below this share of the largest float32 loss are rounded up to it: near 0 relative distances mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How each evaluation runs."""

    by: str
    metric: str
    level: str
    dtype: str
    steps: int
    learning_rate: float
    fp8: Fp8Recipe | None = None
    """Recipe of O3; None: the default. A device without FP8 products emulates them."""

    def __post_init__(self) -> None:
        for name, allowed in (("by", BY), ("metric", METRICS)):
            if getattr(self, name) not in allowed:
                raise ValueError(unknown_choice(name, getattr(self, name), allowed))
        object.__setattr__(self, "level", parse_level(self.level, LEVELS[1:]))
        object.__setattr__(self, "dtype", dtype_name(parse_half_dtype(self.dtype)))
        if self.level == "O3" and self.by != "modules":
            raise ValueError("level='O3' needs by='modules'")
        if self.fp8 is not None and self.level != "O3":
            raise ValueError(f"fp8 with level={self.level!r}: it belongs to level O3")
        check_at_least("steps", self.steps)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: must be above 0")


class Runs:
    """Runs copies of a model with parts of it in float32 (O3: in half); the model and all random states are unchanged."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        settings: RunSettings,
    ) -> None:
        if settings.metric != "output":
            if loss_fn is None:
                raise ValueError(f"metric={settings.metric!r} trains the model: pass loss_fn, or use metric='output'")
            if not any(param.requires_grad for param in model.parameters()):
                raise ValueError(
                    f"metric={settings.metric!r} trains the model, which has no trainable parameter; use metric='output'"
                )
        self._settings = settings
        self._start = _without_dropout(_float32_start(model))
        self._batch = (inputs, targets)
        self._loss_fn = loss_fn
        tensors = [t for t in (*tree_leaves(inputs), *model.parameters()) if isinstance(t, Tensor)]
        self._gpus = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
        self._losses: list[float] = []
        self._output: Tensor | None = None
        if settings.metric == "loss":
            self._losses = self._train(None)
        elif settings.metric == "output":
            self._output = self._forward(None)

    def measure(self, kept: frozenset[str]) -> float:
        """Return the metric with these names in float32; inf if a number was not finite."""
        if self._gpus:
            gc.collect()  # copies of a model with reference cycles stay on the GPU until they are collected
        if self._output is not None:
            return _error(self._forward(kept), self._output)
        losses = self._train(kept)
        if self._settings.metric == "finite":
            return float(self._settings.steps - len(losses))
        return _distance(losses, self._losses) if len(self._losses) == self._settings.steps else math.inf

    def record(self) -> tuple[OperatorStats, list[str]]:
        """Return the operators of one forward pass in half, and the modules in the order of their first calls.

        If operators are searched, those of the loss are included. Excluded modules are left out.
        """
        model, _, precision = self._prepare(frozenset())
        order: dict[str, None] = {}
        excluded = {id(inner) for module in model.modules() if is_excluded(module) for inner in module.modules()}
        for name, module in model.named_modules():
            if id(module) not in excluded:
                module.register_forward_pre_hook(lambda *_, name=name: order.setdefault(name))
        if self._settings.metric != "output":
            model.train()
        with random_states_kept(self._gpus), precision.autocast(), precision.record() as stats:
            inputs, targets = self._fresh_batch(0)
            output = call_model(model, inputs)
            if self._loss_fn is not None and self._settings.by == "ops":
                self._loss_fn(output, targets)
        return stats, list(order)

    def _train(self, kept: frozenset[str] | None) -> list[float]:
        """Return the losses of the successful steps; None keeps everything in float32.

        A step whose gradients overflow is repeated with half the loss scale, so that losses can be compared step by
        step. A step with a non-finite loss, or that overflows without a loss scale, ends the run.
        """
        settings = self._settings
        model, optimizer, precision = self._prepare(kept)
        loss_fn = copy.deepcopy(self._loss_fn) if isinstance(self._loss_fn, nn.Module) else self._loss_fn
        assert optimizer is not None
        assert loss_fn is not None
        model.train()
        losses: list[float] = []
        with random_states_kept(self._gpus):
            while len(losses) < settings.steps:
                inputs, targets = self._fresh_batch(len(losses))
                with precision.autocast():
                    loss = loss_fn(call_model(model, inputs), targets)
                value = float(loss.detach())
                precision.backward(loss)
                is_finite = math.isfinite(value) and _has_finite_gradients(optimizer)
                scale = 1 if precision.scaler is None else precision.scaler.get_scale()
                if not is_finite and (not math.isfinite(value) or scale <= 1):
                    break
                precision.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
                if is_finite:
                    losses.append(value)
        return losses

    def _forward(self, kept: frozenset[str] | None) -> Tensor:
        """Return the output of one forward pass in the model's own mode, flattened to float64."""
        model, _, precision = self._prepare(kept)
        with random_states_kept(self._gpus), torch.no_grad(), precision.autocast():
            output = call_model(model, self._fresh_batch(0)[0])
        parts = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.is_floating_point()]
        if not parts:
            raise ValueError(f"metric='output': the model returns {type(output).__name__} without a floating tensor")
        return torch.cat([part.double().flatten() for part in parts])

    def _prepare(self, kept: frozenset[str] | None) -> tuple[nn.Module, Optimizer | None, Precision]:
        """Return a copy of the start, its optimizer and its precision; None keeps everything in float32."""
        model = copy.deepcopy(self._start)
        optimizer: Optimizer | None = None
        if self._settings.metric != "output":
            params = [param for param in model.parameters() if param.requires_grad]
            optimizer = SGD(params, lr=self._settings.learning_rate)
        precision = Precision("O0") if kept is None else self._precision_with(model, kept)
        if optimizer is None:
            precision.prepare(model)
        else:
            precision.prepare(model, optimizer)
        return model, optimizer, precision

    def _precision_with(self, model: nn.Module, kept: frozenset[str]) -> Precision:
        """Return a precision that keeps operators or modules in float32; at O3 modules in half."""
        settings = self._settings
        modules = [model.get_submodule(name) for name in kept] if settings.by == "modules" else []
        excluded = [module for module in model.modules() if is_excluded(module)]
        options: dict[str, Any] = {"excluded_layers": [*excluded, *modules]}
        if settings.level == "O3":
            device = next((param.device for param in model.parameters()), torch.device("cpu"))
            recipe, half_layers = recipe_for(device, settings.fp8), [*first_and_last(model), *modules]
            options = {"fp8": recipe, "half_layers": half_layers}
        elif settings.by == "ops":
            options["custom_black_list"] = sorted(kept)
        scaler = amp.GradScaler(enable=settings.dtype == "float16", decr_every_n_nan_or_inf=1, max_skips_at_floor=None)
        return Precision(settings.level, settings.dtype, scaler=scaler, **options)

    def _fresh_batch(self, step: int) -> tuple[Any, Any]:
        """Return a copy of the batch, and seed the random states for a step."""
        seed_all(SEED + step)
        inputs, targets = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, self._batch)
        return inputs, targets


def _float32_start(model: nn.Module) -> nn.Module:
    """Return a float32 copy; a decorated model gives its masters."""
    params = list(model.parameters())
    if all(param.dtype not in HALF_DTYPES for param in params):
        return copy.deepcopy(model)
    return amp.float32_copy(model).to(params[0].device)


def _without_dropout(model: nn.Module) -> nn.Module:
    """Disable dropout: on a GPU its mask depends on the dtype."""
    for module in model.modules():
        if isinstance(module, DropoutNd):
            module.p = 0.0
    return model


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


def _distance(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference of the losses; inf if the run ended early.

    >>> reference = [2.0, 1.0, 0.001]
    >>> _distance([2.0, 1.25, 0.001], reference), round(_distance([2.0, 1.0, 0.011], reference), 6)
    (0.25, 0.5)
    >>> _distance([2.0], reference), _distance([0.0], [0.0]), _distance([1.0], [0.0])
    (inf, 0.0, inf)
    """
    if len(losses) < len(reference):
        return math.inf
    floor = SMALL_LOSS * max(map(abs, reference))
    gaps = [(abs(a - b), max(abs(b), floor)) for a, b in zip(losses, reference, strict=True)]
    return max(0.0 if gap == 0 else gap / scale if scale else math.inf for gap, scale in gaps)


def _error(output: Tensor, reference: Tensor) -> float:
    """Return the relative L2 error; inf if a number is not finite.

    >>> reference = torch.tensor([3.0, 4.0])
    >>> round(_error(torch.tensor([3.0, 4.5]), reference), 6), _error(torch.tensor([math.nan, 4.0]), reference)
    (0.1, inf)
    >>> _error(torch.zeros(2), torch.zeros(2)), _error(torch.ones(2), torch.zeros(2))
    (0.0, inf)
    """
    if output.shape != reference.shape or not (output.isfinite().all() and reference.isfinite().all()):
        return math.inf
    gap, scale = (output - reference).norm().item(), reference.norm().item()
    return 0.0 if gap == 0 else gap / scale if scale else math.inf
