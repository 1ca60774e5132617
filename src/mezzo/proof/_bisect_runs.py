"""What a bisection measures: copies of one model, trained from the same start on one batch, against float32."""

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
"""Share of the largest loss of the float32 run below which a loss counts as that: a loss near 0 has no relative distance."""


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
    """Of O3; None: the usual one. Where the device has no FP8 products they are emulated."""

    def __post_init__(self) -> None:
        for name, allowed in (("by", BY), ("metric", METRICS)):
            if getattr(self, name) not in allowed:
                raise ValueError(unknown_choice(name, getattr(self, name), allowed))
        object.__setattr__(self, "level", parse_level(self.level, LEVELS[1:]))
        object.__setattr__(self, "dtype", dtype_name(parse_half_dtype(self.dtype)))
        if self.level == "O3" and self.by != "modules":
            raise ValueError("level='O3' finds the layers that must stay in half: by='modules'")
        if self.fp8 is not None and self.level != "O3":
            raise ValueError(f"fp8 with level={self.level!r}: it belongs to level O3")
        check_at_least("steps", self.steps)
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: must be above 0")


class Runs:
    """Runs a model with some of it in float32 (O3: in half), again and again; it and all random states stay as they are."""

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
                raise ValueError(f"metric={settings.metric!r} trains: give a loss_fn, or metric='output'")
            if not any(param.requires_grad for param in model.parameters()):
                raise ValueError(
                    f"metric={settings.metric!r} trains: the model has no parameter to train; use 'output'"
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
        """Return the metric with modules or operators in float32; inf where a number was not finite."""
        if self._gpus:
            gc.collect()  # copies of a model that refers to itself stay on the GPU until the collector comes by
        if self._output is not None:
            return _error(self._forward(kept), self._output)
        losses = self._train(kept)
        if self._settings.metric == "finite":
            return float(self._settings.steps - len(losses))
        return _distance(losses, self._losses) if len(self._losses) == self._settings.steps else math.inf

    def record(self) -> tuple[OperatorStats, list[str]]:
        """Return the operators of one forward in half, and the names of the modules in the order of their first calls.

        Where operators are looked for, those of the loss belong to it. Modules that are excluded already are left out.
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
        """Return the losses of the steps that were taken; None keeps everything in float32.

        A step whose gradients overflow is repeated with half the loss scale, so that curves can be compared step by step.
        One whose loss is not finite, or that overflows without a scale, is the end.
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
        """Return the output of one forward in the model's own mode, all its floating tensors in one row of float64."""
        model, _, precision = self._prepare(kept)
        with random_states_kept(self._gpus), torch.no_grad(), precision.autocast():
            output = call_model(model, self._fresh_batch(0)[0])
        parts = [part for part in tree_leaves(output) if isinstance(part, Tensor) and part.is_floating_point()]
        if not parts:
            raise ValueError(
                f"metric='output': the model returns {type(output).__name__} without a floating tensor in it"
            )
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
        """Return the batch as it was at first, with the random numbers of a step ahead."""
        seed_all(SEED + step)
        inputs, targets = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, self._batch)
        return inputs, targets


def _float32_start(model: nn.Module) -> nn.Module:
    """Return a copy to start from; of a decorated model with its masters as weights."""
    params = list(model.parameters())
    if all(param.dtype not in HALF_DTYPES for param in params):
        return copy.deepcopy(model)
    return amp.float32_copy(model).to(params[0].device)


def _without_dropout(model: nn.Module) -> nn.Module:
    """Switch dropout layers off: on a GPU the same seed drops other elements in half than in float32."""
    for module in model.modules():
        if isinstance(module, DropoutNd):
            module.p = 0.0
    return model


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    return all(bool(grad.isfinite().all()) for grad in grads)


def _distance(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative distance of a loss from the float32 run's; inf if the run ended early."""
    if len(losses) < len(reference):
        return math.inf
    floor = SMALL_LOSS * max(map(abs, reference))
    gaps = [(abs(a - b), max(abs(b), floor)) for a, b in zip(losses, reference, strict=True)]
    return max(0.0 if gap == 0 else gap / scale if scale else math.inf for gap, scale in gaps)


def _error(output: Tensor, reference: Tensor) -> float:
    """Return the L2 norm of the difference over that of the reference; inf where either is not finite."""
    if output.shape != reference.shape or not (output.isfinite().all() and reference.isfinite().all()):
        return math.inf
    gap, scale = (output - reference).norm().item(), reference.norm().item()
    return 0.0 if gap == 0 else gap / scale if scale else math.inf
