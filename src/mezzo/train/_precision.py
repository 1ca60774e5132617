"""What a training step asks of a precision: one object, so that the loop has no branches on dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import (
    Fp8Recipe,
    GradScaler,
    Policy,
    auto_cast,
    decorate,
    exclude_layers,
    find_excluded,
    first_and_last,
    fp8_scales,
    keep_in_half,
    load_fp8_scales,
    load_lists,
    resolve_name,
)
from mezzo.dtypes import LEVELS, PRECISION_DTYPES
from mezzo.errors import unknown_choice
from mezzo.fp8 import refuse_without_fp8

#: What the documents' segmentation command adds to the lists.
SEGMENTATION_WHITE = ("elementwise_add", "batch_norm")
SEGMENTATION_BLACK = ("bilinear_interp_v2",)
FIRST_LOSS_SCALE = 1024.0  # of both documented training commands
_FP8_SCALES = "fp8_scales"


class Precision(Protocol):
    """Prepares a model, and takes the part of a step that depends on the precision."""

    name: str
    scaler: GradScaler | None
    policy: Policy | None
    excluded_layers: tuple[str, ...]
    """Names or globs of modules that stay in float32."""

    def prepare(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Make model and optimizer ready, in place; before any wrapper for distributed training."""

    def keep_float32(self, model: nn.Module) -> None:
        """Keep layers in float32 that a list file names, and in half those of O3, in place: all that an evaluation needs;
        `prepare` does it too."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the region in which forward and loss run."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Update the weights, clipped; an overflow is skipped on the device, the host is not asked."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""


class FullPrecision:
    """float32 throughout."""

    name = "fp32"
    scaler: GradScaler | None = None
    policy: Policy | None = None
    excluded_layers: tuple[str, ...] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Leave both as they are."""

    def keep_float32(self, model: nn.Module) -> None:
        """Leave it as it is."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a region that does nothing."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Clip and update."""
        if max_norm is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take any state, of whatever precision the checkpoint was."""


class MixedPrecision:
    """`auto_cast` by a policy, half weights with masters, a loss scale for float16.

    Args:
        policy: Decides the dtype of every operator.
        scaler: Of float16; None: one that starts as both documented training commands do.
        excluded_layers: Names or globs of modules that stay in float32.
        half_layers: O3: names or globs of modules whose products stay in half besides those of the first and the last layer.
        lists: The file that named them, for messages.
    """

    def __init__(
        self,
        policy: Policy,
        scaler: GradScaler | None = None,
        *,
        excluded_layers: Sequence[str] = (),
        half_layers: Sequence[str] = (),
        lists: Path | None = None,
    ) -> None:
        self.excluded_layers: tuple[str, ...] = tuple(excluded_layers)
        self._half_layers = half_layers
        self._lists = lists
        self.policy: Policy | None = policy
        self._level, self._dtype = policy.level, policy.dtype
        self._region = auto_cast(policy=policy)
        self._model: nn.Module | None = None
        is_fp16 = policy.dtype is torch.float16
        self._scaler = scaler or GradScaler(enable=is_fp16, init_loss_scaling=FIRST_LOSS_SCALE)
        self.scaler: GradScaler | None = self._scaler if is_fp16 else None
        self.name = f"{'fp16' if is_fp16 else 'bf16'} {policy.level}"

    def prepare(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Make the weights half that only ever compute in half, with masters: no step casts a weight."""
        assert self.policy is not None
        excluded = self._find(model, self.excluded_layers, "excluded_layers")
        if self._level == "O3":
            in_half = self._find_half_layers(model)
            recipe = Fp8Recipe.of(self.policy.fp8)
            for device in {param.device for param in model.parameters()}:
                refuse_without_fp8(device, recipe.emulate)
            decorate(
                model, optimizer, level="O3", dtype=self._dtype, excluded_layers=excluded, half_layers=in_half, fp8=recipe
            )  # fmt: skip
        elif self._level in ("O1", "O2"):
            decorate(model, optimizer, level=self._level, dtype=self._dtype, excluded_layers=excluded)
        else:
            exclude_layers(model, excluded)
        self._model = model
        self._scaler.name_parameters(model)
        if self.scaler is not None:
            self.scaler.protect_batch_norm(model)

    def keep_float32(self, model: nn.Module) -> None:
        """Keep the excluded layers in float32, and at O3 some in half."""
        in_half = self._find_half_layers(model) if self._level == "O3" else []
        exclude_layers(model, self._find(model, self.excluded_layers, "excluded_layers"))
        keep_in_half(model, in_half)

    def _find_half_layers(self, model: nn.Module) -> list[nn.Module]:
        return [*first_and_last(model), *self._find(model, self._half_layers, "half_layers")]

    def _find(self, model: nn.Module, names: Sequence[str], argument: str) -> list[nn.Module]:
        try:
            return find_excluded(model, names, argument)
        except ValueError as error:
            raise ValueError(f"{self._lists}: {error}" if self._lists else str(error)) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the region of the policy."""
        return self._region

    def backward(self, loss: Tensor) -> None:
        """Compute scaled gradients."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> None:
        """Unscale, clip and update in one go."""
        if max_norm is not None:
            self._scaler.clip_grad_norm_(optimizer, max_norm)
        self._scaler.step(optimizer)
        self._scaler.update()

    @property
    def _has_delayed_scales(self) -> bool:
        assert self.policy is not None
        return self.policy.fp8 is not None and self.policy.fp8.scaling == "delayed" and self._model is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its counters, and what delayed FP8 scales are made from."""
        state = self._scaler.state_dict()
        if self._has_delayed_scales:
            assert self._model is not None
            state[_FP8_SCALES] = fp8_scales(self._model)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scales; a checkpoint without one (fp32, bf16) leaves the first scale.

        Raises:
            ValueError: The FP8 scales are not those of this model, or the loss scale is none. Nothing was changed then.
        """
        state = dict(state)
        of_fp8 = state.pop(_FP8_SCALES, {})
        loads_scale = bool(state) and self.scaler is not None
        if loads_scale:
            GradScaler().load_state_dict(state)  # finds what is wrong with it, before the FP8 scales change
        if self._has_delayed_scales:
            assert self._model is not None
            load_fp8_scales(self._model, of_fp8)
        if loads_scale:
            self._scaler.load_state_dict(state)


def make_precision(
    precision: str,
    level: str,
    task: Literal["classification", "segmentation"] = "classification",
    lists: Path | None = None,
    fp8: Mapping[str, Any] | None = None,
    use_promote: bool | None = None,
) -> Precision:
    """Return the precision of a command line.

    Args:
        precision: `fp32`, `fp16` or `bf16`.
        level: `O0` (the same as fp32), `OD`, `O1`, `O2` or `O3`.
        task: Segmentation's documented command edits the lists; both start at the same loss scale.
        lists: A file of lists (`amp.read_lists`), added to those of the task; where they contradict, the file decides.
            At fp32 and O0 it has no effect.
        fp8: O3: settings of an `Fp8Recipe`.
        use_promote: O2 and O3: see `auto_cast`; None is its default.

    Raises:
        ValueError: A choice is unknown, or the file is wrong.

    >>> make_precision("fp16", "O2").name, make_precision("fp32", "O1").name
    ('fp16 O2', 'fp32')
    """
    if precision not in PRECISION_DTYPES:
        raise ValueError(unknown_choice("precision", precision, tuple(PRECISION_DTYPES)))
    if level not in LEVELS:
        raise ValueError(unknown_choice("amp_level", level, LEVELS))
    if precision == "fp32" or level == "O0":
        return FullPrecision()
    own = {} if lists is None else load_lists(lists)
    if "half_layers" in own and level != "O3":
        raise ValueError(f"{lists}: half_layers with amp_level {level}: they belong to level O3")
    white, black = _merged(own, task)
    promote: dict[str, Any] = {} if use_promote is None else {"use_promote": use_promote}
    policy = Policy.create(
        level, dtype=PRECISION_DTYPES[precision], custom_white_list=white, custom_black_list=black, fp8=fp8, **promote
    )
    excluded, in_half = own.get("excluded_layers", ()), own.get("half_layers", ())
    return MixedPrecision(policy, excluded_layers=excluded, half_layers=in_half, lists=lists)


def _merged(own: Mapping[str, Sequence[str]], task: str) -> tuple[list[str], list[str]]:
    """Return the white and the black list: a file's, and of the task's what the file does not put on the other list."""
    white, black = own.get("custom_white_list", ()), own.get("custom_black_list", ())
    if task != "segmentation":
        return list(white), list(black)
    return [*_less(SEGMENTATION_WHITE, black), *white], [*_less(SEGMENTATION_BLACK, white), *black]


def _less(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the operators of some names that others do not mean."""
    return sorted(_operators(names) - _operators(others))


def _operators(names: Sequence[str]) -> frozenset[str]:
    return frozenset().union(*map(resolve_name, names))
