"""Hugging Face Accelerate: an `Accelerator` whose training steps a `mezzo.Precision` takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import GradScaler, auto_cast
from mezzo.errors import MissingExtra
from mezzo.optim import attach, engine_of, unwrap_optimizer
from mezzo.precision import Precision

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import is_compiled_module
except ModuleNotFoundError as error:
    raise MissingExtra("mezzo.integrations.accelerate needs accelerate: pip install 'mezzo[accelerate]'") from error

from mezzo.integrations._accelerate_steps import MezzoOptimizer, is_prepared, note_prepared, outcomes_of, run_in_region

__all__ = ["MezzoAccelerator", "MezzoOptimizer"]

_DISTRIBUTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class MezzoAccelerator(Accelerator):
    """An Accelerator for half weights with float32 masters, in place of `mixed_precision`.

    `prepare` makes models and optimizers ready by `Precision.prepare`. A prepared model runs inside
    `Precision.autocast`. Several optimizers that step after one `backward` with a loss scale raise
    an error: the first step changes the scale that the gradients of the second carry.

    Args:
        args: Passed on to `accelerate.Accelerator`.
        precision: Level, dtype, lists and loss scaler.
        fuse: See `Precision.prepare`.
        float32_outputs: Outputs of prepared models become float32, so that a loss outside of the
            model is computed in float32. False: they stay half; compute the loss in the model or
            inside `accelerator.autocast()`.
        kwargs: Passed on to `accelerate.Accelerator`.

    Raises:
        ValueError: `mixed_precision` is set too, by an argument or by `accelerate config`, or the
            kind of distributed training is not supported (only DDP is).
    """

    precision: Precision

    def __init__(
        self, *args: Any, precision: Precision, fuse: bool = False, float32_outputs: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._take_over(precision, fuse, float32_outputs)

    @staticmethod
    def adopt(
        accelerator: Accelerator, precision: Precision, *, fuse: bool = False, float32_outputs: bool = True
    ) -> MezzoAccelerator:
        """Make an Accelerator that other code created one of this class, in place; return it."""
        accelerator.__class__ = MezzoAccelerator
        accelerator._take_over(precision, fuse, float32_outputs)
        return accelerator  # type: ignore[no-any-return]

    def _take_over(self, precision: Precision, fuse: bool, float32_outputs: bool) -> None:
        if not isinstance(precision, Precision):
            raise TypeError(f"precision={precision!r}: must be a mezzo.Precision")
        if self.mixed_precision != "no":
            raise ValueError(f"mixed_precision={self.mixed_precision!r} beside precision={precision!r}: set it to 'no'")
        if self.distributed_type not in _DISTRIBUTED:
            raise ValueError(f"{self.distributed_type}: MezzoAccelerator supports one process or DDP; use DDP")
        self.precision = precision
        self._fuse, self._float32_outputs = fuse, float32_outputs
        self._outcomes = outcomes_of(precision.scaler)
        self._stepped: list[MezzoOptimizer] = []
        self._clipper = precision.scaler or GradScaler(enable=False)
        recipe = precision.policy.fp8 if precision.policy is not None else None
        has_fp8_scales = recipe is not None and recipe.scaling == "delayed"
        # save_state() and load_state() keep the state of what has this name
        self.scaler = precision if has_fp8_scales else precision.scaler

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Convert models and their optimizers in place, then prepare everything as Accelerate does."""
        models = [each for each in args if isinstance(each, nn.Module) and not is_prepared(each)]
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        if models:
            self._convert(models, optimizers, device_placement)
        return super().prepare(*args, device_placement=device_placement)

    def _convert(self, models: Sequence[nn.Module], optimizers: list[Optimizer], placement: Any) -> None:
        if self.device_placement and placement is None:
            for model in models:
                model.to(self.device)
        together = models[0] if len(models) == 1 else nn.ModuleList(models)
        if optimizers:
            self.precision.prepare(together, optimizers, fuse=self._fuse)
        elif any(param.requires_grad for param in together.parameters()):
            self.precision.prepare(together, fuse=self._fuse)
        else:
            self.precision.prepare_for_evaluation(together)
        for model in models:
            note_prepared(model)
            run_in_region(model, self.precision, float32_outputs=self._float32_outputs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; with `evaluation_mode` its weights do not change."""
        if evaluation_mode and not is_prepared(model):
            self.precision.prepare_for_evaluation(model)
            run_in_region(model, self.precision, float32_outputs=self._float32_outputs)
        elif not is_prepared(model):
            self._convert([model], [], device_placement)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        if is_compiled_module(prepared):
            run_in_region(prepared, self.precision, float32_outputs=False)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer so that its steps are those of the precision."""
        engine = engine_of(unwrap_optimizer(optimizer))
        if not engine.attached and engine.has_masters():
            attach(engine.optimizer)  # its model was prepared by another call
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(prepared, MezzoOptimizer):
            prepared.__class__ = MezzoOptimizer
            prepared.precision, prepared.outcomes = self.precision, self._outcomes
        if not any(each is prepared for each in self._stepped):
            self._stepped.append(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the scaled loss, divided by the number of accumulated batches."""
        steps = self.gradient_accumulation_steps
        self.precision.backward(loss if steps == 1 else loss / steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale in place; None: those of all optimizers."""
        chosen = self._stepped if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self._clipper.unscale_(each)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the norm of the true gradients; return the norm before.

        If these are the parameters of the one optimizer, the next step multiplies by the coefficient,
        and the gradients stay as they are. Otherwise they are unscaled and clipped in place.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type == 2 and len(self._stepped) == 1:
            (optimizer,) = self._stepped
            own = (param for group in optimizer.param_groups for param in group["params"])
            if _with_grads(params) == _with_grads(own):
                return self._clipper.clip_grad_norm_(optimizer, max_norm)
        self.unscale_gradients()
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the true gradients to at most `clip_value`, in place."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return the region for a loss outside of the model."""
        if autocast_handler is not None and not autocast_handler.enabled:
            return auto_cast(enable=False)
        return self.precision.autocast()

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that was prepared."""
        self._stepped.clear()
        return super().free_memory(*objects)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` wrote; training continues with the same bits."""
        self._outcomes.settle()
        super().load_state(*args, **kwargs)


def _with_grads(params: Iterable[Tensor]) -> set[int]:
    return {id(param) for param in params if param.grad is not None}
