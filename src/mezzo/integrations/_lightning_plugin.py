"""What Lightning's hooks do with mezzo, for both distributions of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import GradScaler
from mezzo.integrations import _lightning_state as running
from mezzo.integrations._lightning_averages import average_masters
from mezzo.optim import attach, engine_of, publish, share_weights
from mezzo.precision import Precision

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

_FLAGS = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed", torch.float32: "32-true"}


class LightningPlugin(_Base):  # type: ignore[misc]
    """mezzo's mixed precision as a plugin: `Trainer(plugins=[...])` or `Fabric(plugins=[...])`.

    Weights become half with float32 masters before the strategy wraps the model; checkpoints hold the masters. In
    float16 the loss is scaled and overflowing steps are skipped; gradients are clipped by their true values.

    Args:
        level: `O0`, `OD`, `O1`, `O2` or `O3`; see `mezzo.Precision`.
        dtype: `float16` or `bfloat16`.
        fuse: See `Precision.prepare`.
        options: Other arguments of `mezzo.Precision`: lists, excluded layers, a scaler, an FP8 recipe.
    """

    _lightning: Any
    """The package whose plugin this is."""

    def __init__(
        self, level: str = "O1", dtype: str | torch.dtype = "float16", *, fuse: bool = False, **options: Any
    ) -> None:
        self.mezzo = Precision(level, dtype, **options)
        """The object that decides all dtypes."""
        self.precision = _FLAGS[self.mezzo.dtype]
        """Lightning's name of the nearest precision, for its summaries and throughput."""
        self.scaler = self.mezzo.scaler
        """The loss scaler; None if the loss is not scaled."""
        self._scaler = self.scaler or GradScaler(enable=False)
        self._fuse = fuse
        self._prepared: dict[nn.Module, list[torch.dtype]] = {}
        self._masters: list[tuple[nn.Parameter, Tensor]] = []
        self._optimizers: set[Optimizer] = set()
        self._unscaled: set[Optimizer] = set()
        self._stepped: set[Optimizer] = set()

    def __repr__(self) -> str:
        return repr(self.mezzo).replace("Precision", type(self).__name__, 1)

    # Before training

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make the weights half, in place; for `validate`, `test` and `predict` only mark excluded layers."""
        trainer = running.trainer_of(self._lightning, module)
        trains = trainer is None or trainer.state.fn == "fit"
        if not trains and module not in self._prepared:
            self.mezzo.prepare_for_evaluation(module)
        elif trains and self._prepared.get(module) != running.dtypes_of(
            module
        ):  # new, or converted by `module.float()`
            if trainer is not None:
                self._prepared.clear()
                module.to(trainer.strategy.root_device)  # O3 looks at the device
            self.mezzo.prepare(module, fuse=self._fuse)
            self._prepared[module] = running.dtypes_of(module)
        if trainer is not None and trains:
            average_masters(self._lightning.callbacks, trainer.callbacks)
            self._masters = running.masters_of(module) if running.has_several_ranks() else []
        return module

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Let the Trainer's optimizers update masters."""
        if self._masters:  # DDP copied half weights from the first rank, which would round the masters
            params, masters = zip(*self._masters, strict=True)
            self._masters = []
            publish(params, masters)
            share_weights(model)
        for optimizer in optimizers:
            if engine_of(optimizer).has_masters():
                attach(optimizer)
        self._optimizers = set(optimizers)
        return model, optimizers, lr_schedulers

    # Forward passes

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region in which the policy decides the dtype of every operator."""
        self._update_scale()
        return self.mezzo.autocast()

    autocast_context_manager = forward_context

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Run a training step in the region; with manual optimization it also steps the optimizers."""
        with self.forward_context():
            yield
        self._update_scale()

    def convert_output(self, data: Any) -> Any:
        """Return half outputs of a Fabric module as float32: its loss may be outside of the region."""
        return running.float32_of(data)

    # Backward passes

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Scale the loss of a Trainer, and call its hooks."""
        self._update_scale()
        if running.trainer_of(self._lightning, module) is not None:
            tensor = super().pre_backward(tensor, module)
        return tensor

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; the loss of Fabric is scaled here, that of a Trainer already is."""
        if running.trainer_of(self._lightning, model) is None:
            self._unscaled.clear()  # of a step that was not taken: to unscale again is an error
            self._scaler.scale(tensor).backward(*args, **kwargs)
        else:
            super().backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Tensor:
        """Call the Trainer's hooks."""
        if running.trainer_of(self._lightning, module) is not None:
            tensor = super().post_backward(tensor, module)
        return tensor

    # The step

    def optimizer_step(
        self, optimizer: Optimizer, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure, show and clip true gradients, and take the step unless they overflowed."""
        if closure is not None and self.scaler is None and engine_of(optimizer).needs_closure:
            if model is None:
                return optimizer.step(closure, **kwargs)
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = None if closure is None else closure()
        if model is not None:
            if self.scaler is not None and result is None and model.automatic_optimization:
                return None  # training_step returned None: there is no gradient
            self._after_closure(model, optimizer)
        if optimizer in self._stepped:
            self._update_scale()
        stepped = self._scaler.step(optimizer, **kwargs)
        self._unscaled.discard(optimizer)
        self._stepped.add(optimizer)
        if len(self._optimizers) == 1 or not running.grads_wait(self._prepared, self._stepped):
            self._update_scale()
        return stepped if result is None else result

    def _after_closure(self, model: Any, optimizer: Optimizer) -> None:
        """Call the Trainer's hooks before a step, with true gradients if one of them may look."""
        if self.scaler is not None and running.shows_gradients(self._lightning, model):
            self.unscale_gradients(optimizer)
        super()._after_closure(model, optimizer)

    def _update_scale(self) -> None:
        """Adapt the loss scale after the last step; several optimizers may share one backward pass."""
        if self._stepped:
            self._stepped.clear()
            self._scaler.update()

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide gradients by the loss scale in place, once per step."""
        if optimizer not in self._unscaled:
            self._scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Clip true gradients by `norm` or by `value`; 0 does not clip."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper, with manual optimization
        if clip_val > 0 and gradient_clip_algorithm == "value":
            self.unscale_gradients(optimizer)
            nn.utils.clip_grad_value_([p for group in optimizer.param_groups for p in group["params"]], clip_val)
        elif clip_val > 0:
            self._scaler.clip_grad_norm_(optimizer, clip_val)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale and FP8 scales; masters are in the state of the model."""
        self._update_scale()
        return self.mezzo.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.mezzo.load_state_dict(state_dict)
