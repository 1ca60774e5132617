"""Hugging Face Trainer: a mixin that trains with a `mezzo.Precision` instead of `bf16=True` or `fp16=True`."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

from torch import nn

from mezzo.errors import MissingExtra
from mezzo.precision import Precision

try:
    from accelerate.utils import convert_to_fp32
    from transformers import PreTrainedModel, Trainer
except ModuleNotFoundError as error:
    raise MissingExtra(
        "mezzo.integrations.transformers needs transformers: pip install 'mezzo[transformers]'"
    ) from error

from mezzo.integrations.accelerate import MezzoAccelerator

__all__ = ["MezzoTrainer", "MezzoTrainerMixin"]

_MARK = "_mezzo_saves_float32"
_REFUSED = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")


class MezzoTrainerMixin:
    """Put it before `Trainer`, or a subclass of it: `class MyTrainer(MezzoTrainerMixin, Trainer)`.

    Forward pass, loss and evaluation run inside `Precision.autocast`; steps, clipping and
    accumulation are those of `MezzoAccelerator`. Checkpoints hold float32 weights, and
    `resume_from_checkpoint` continues with the same bits. Training logs also get `Precision.numbers`.

    Args:
        args: Passed on to the Trainer.
        precision: Level, dtype, lists and loss scaler.
        fuse: See `Precision.prepare`.
        kwargs: Passed on to the Trainer.

    Raises:
        ValueError: The training arguments set bf16 or fp16 too, or several GPUs are used by one
            process (start one process per GPU, with torchrun).
    """

    accelerator: Any
    args: Any

    def __init__(self, *args: Any, precision: Precision, fuse: bool = False, **kwargs: Any) -> None:
        if not isinstance(precision, Precision):
            raise TypeError(f"precision={precision!r}: must be a mezzo.Precision")
        self.precision, self._fuse = precision, fuse
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the Trainer create its accelerator, and give it the precision."""
        given = [name for name in _REFUSED if getattr(self.args, name, False)]
        if given:
            raise ValueError(f"{given[0]}=True beside precision={self.precision!r}: leave {given[0]} out")
        if self.args.n_gpu > 1:
            raise ValueError(f"{self.args.n_gpu} GPUs in one process: start one process per GPU, with torchrun")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The Trainer computes the loss inside of its context, so logits need no float32 copy
        MezzoAccelerator.adopt(self.accelerator, self.precision, fuse=self._fuse, float32_outputs=False)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the region for the forward pass and the loss, in training and evaluation."""
        return self.precision.autocast()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; from here on `save_pretrained` names the dtype that it writes."""
        model: Any = self.model  # type: ignore[attr-defined]
        if isinstance(model, PreTrainedModel):
            save_as_float32(model)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch; half logits become float32, for `compute_metrics`."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        return loss, convert_to_fp32(logits), labels

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the loss scale of a checkpoint, unless this run has none: float16 may continue as bfloat16."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the Trainer logs; beside a training loss also the numbers of the precision."""
        if "loss" in logs:
            logs = {**logs, **self.precision.numbers()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class MezzoTrainer(MezzoTrainerMixin, Trainer):
    """`transformers.Trainer` with `precision=` and `fuse=`."""


def save_as_float32(model: nn.Module) -> None:
    """Let `save_pretrained` write `float32` as the dtype into config.json.

    A prepared model saves its float32 masters, but transformers writes the dtype of its half
    parameters, and `from_pretrained` would round the weights to it.
    """
    if _MARK in vars(model):
        return
    kind: Any = type(model)
    save = kind.save_pretrained

    @functools.wraps(save)
    def save_pretrained(own: Any, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind(own, save_directory, is_main_process, *args, **kwargs).arguments
        if given.get("push_to_hub"):
            raise ValueError("save_pretrained(push_to_hub=True) would upload a half dtype: call push_to_hub(repo_id)")
        result = save(own, save_directory, is_main_process, *args, **kwargs)
        own.config.dtype = "float32"
        if is_main_process:
            own.config.save_pretrained(save_directory)
        return result

    model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]
    setattr(model, _MARK, True)
