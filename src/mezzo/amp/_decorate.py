"""`decorate`: half weights in the module, a float32 master behind each, and an optimizer that updates both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp._averages import average_masters
from mezzo.amp._checkpoint import keep_float32_checkpoints, parse_save_dtype
from mezzo.amp._conversions import follow_conversions
from mezzo.amp._decorate_checks import (
    as_list,
    check_optimizer_state,
    ids_of_parameters,
    parse_master_weight,
    parse_optimizer_state,
    refuse_other_dtype,
    refuse_other_masters,
    refuse_scripted,
    refuse_sharded,
    refuse_uninitialised,
    refuse_wrapped,
    warn_about_foreign_optimizers,
    warn_about_vanishing_eps,
)
from mezzo.amp._decorated import note_decoration
from mezzo.amp._exclude import Excluded, exclude_layers, find_excluded, is_excluded, refuse_half_without_master
from mezzo.amp._fp8 import first_and_last, keep_in_half, refuse_other_fp8
from mezzo.amp._half_weights import cast_model, widen_state
from mezzo.amp._steps import check_again, watch_optimizers
from mezzo.amp.hardware import warn_if_unsupported
from mezzo.amp.support import refuse_other_devices
from mezzo.dtypes import parse_half_dtype, parse_level
from mezzo.fp8 import Fp8Recipe, refuse_without_fp8
from mezzo.optim import (
    attach,
    copy_masters_with_parameters,
    engine_of,
    refuse_lookalike,
    remember_names,
    stored_dtype,
    unwrap_optimizer,
)

Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])

_HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")


@overload
def decorate(
    models: Models,
    optimizers: None = None,
    level: str = ...,
    dtype: str | torch.dtype = ...,
    master_weight: bool | Literal["compact"] | None = ...,
    save_dtype: str | torch.dtype | None = ...,
    master_grad: bool = ...,
    excluded_layers: Excluded | Sequence[Excluded] | None = ...,
    *,
    excluded_parameters: Iterable[nn.Parameter] = ...,
    half_layers: Excluded | Sequence[Excluded] | None = ...,
    fp8: Fp8Recipe | Mapping[str, Any] | None = ...,
    optimizer_state: str | torch.dtype | None = ...,
) -> Models: ...
@overload
def decorate(
    models: Models,
    optimizers: Optimizers,
    level: str = ...,
    dtype: str | torch.dtype = ...,
    master_weight: bool | Literal["compact"] | None = ...,
    save_dtype: str | torch.dtype | None = ...,
    master_grad: bool = ...,
    excluded_layers: Excluded | Sequence[Excluded] | None = ...,
    *,
    excluded_parameters: Iterable[nn.Parameter] = ...,
    half_layers: Excluded | Sequence[Excluded] | None = ...,
    fp8: Fp8Recipe | Mapping[str, Any] | None = ...,
    optimizer_state: str | torch.dtype | None = ...,
) -> tuple[Models, Optimizers]: ...
def decorate(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    level: str = "O1",
    dtype: str | torch.dtype = "float16",
    master_weight: bool | Literal["compact"] | None = None,
    save_dtype: str | torch.dtype | None = None,
    master_grad: bool = False,
    excluded_layers: Excluded | Sequence[Excluded] | None = None,
    *,
    excluded_parameters: Iterable[nn.Parameter] = (),
    half_layers: Excluded | Sequence[Excluded] | None = None,
    fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    optimizer_state: str | torch.dtype | None = None,
) -> Any:
    """Store weights in half and keep a float32 master of each, in place.

    A master is the float32 value of a half weight; the optimizer updates it and rounds it to the half weight. All
    arguments are checked before anything is changed.

    Args:
        models: A module or a list of them, not yet wrapped for distributed training.
        optimizers: The optimizers of these models. Their `step()` then updates masters and half weights. Without
            them, masters are first updated by `scaler.step(optimizer)`. Accelerate's wrappers work too.
        level: `O2`: all floating parameters become half, except those of BatchNorm, and in float16 also of LayerNorm and
            InstanceNorm; buffers stay float32. `O1`: weights and biases of Linear and convolution layers, which only
            compute in half. `O3`: as O2, and layers whose products stay in half are marked. Parameters that a level
            keeps in float32 become float32 again if they were made half by hand (`model.half()`).
        dtype: `float16` or `bfloat16`.
        master_weight: False updates the half weights themselves, which loses small updates. `compact` keeps only the 16
            bits of each master that its half weight lacks: two bytes less per parameter, and less memory traffic per
            step.
        save_dtype: Dtype of all floating tensors in `state_dict()`; None gives the float32 masters.
        master_grad: Gradients of half weights arrive and accumulate in float32.
        excluded_layers: Modules, types or name globs whose weights and arithmetic stay in float32.
        excluded_parameters: Parameters that stay float32; the policy decides about operators that use them.
        half_layers: O3: modules, types or name globs whose products stay in half. None: the first and the last layer.
            `()`: no layer.
        fp8: O3: the recipe that `auto_cast` will get; used to check that the device can run it.
        optimizer_state: Dtype of the optimizer's moments (SGD with momentum, Adam, AdamW). `bfloat16` halves them and
            rounds stochastically. None: float32, or as an earlier call set it.

    Returns:
        The same models, or the pair (models, optimizers) if optimizers were given.

    Raises:
        ValueError: An argument is not one of those above, a model is on a device other than CPU and CUDA, or an optimizer
            cannot have bfloat16 state.
        RuntimeError: A model is already wrapped for distributed training, scripted, decorated in the other dtype, or has
            masters of another kind than `master_weight` asks for.
        ValueError: O3 with layers of torchao or Transformer Engine, which would quantise twice.
    """
    level, half = parse_level(level, ("O1", "O2", "O3")), parse_half_dtype(dtype)
    saved_as = parse_save_dtype(save_dtype)
    masters, state_dtype = parse_master_weight(master_weight), parse_optimizer_state(optimizer_state)
    model_list = as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else as_list(optimizers, Optimizer, "optimizers")
    optimizer_list = [unwrap_optimizer(optimizer) for optimizer in optimizer_list]
    for optimizer in optimizer_list:
        refuse_lookalike(optimizer)
    for index, model in enumerate(model_list):
        refuse_wrapped(model, "" if isinstance(models, nn.Module) else f"models[{index}]")
        refuse_uninitialised(model)
        refuse_other_devices(model)
        refuse_scripted(model)
        refuse_other_dtype(model, half)
    excluded = [
        [*find_excluded(model, excluded_layers), *(part for part in model.modules() if is_excluded(part))]
        for model in model_list
    ]
    in_half = _find_half_layers(model_list, level, half_layers, fp8)
    if level == "O3":
        for model, layers, halves in zip(model_list, excluded, in_half, strict=True):
            refuse_other_fp8(model, [*layers, *halves])
    stay = ids_of_parameters(excluded_parameters, model_list)
    for layers in excluded:
        refuse_half_without_master(layers)
    if masters == "compact":
        refuse_sharded(model_list)
    check_optimizer_state(state_dtype, masters, optimizer_list)
    if master_weight is not None:
        refuse_other_masters(model_list, masters)
    if master_grad and not _HAS_GRAD_DTYPE:
        raise RuntimeError("master_grad=True needs Tensor.grad_dtype, which this torch does not have")

    warn_about_foreign_optimizers(model_list, optimizer_list)
    if masters == "none" and half is torch.float16:
        warn_about_vanishing_eps(optimizer_list)
    if torch.cuda.is_initialized():
        warn_if_unsupported(half)
    widened: list[nn.Parameter] = []
    for model, layers, halves in zip(model_list, excluded, in_half, strict=True):
        exclude_layers(model, layers)
        keep_in_half(model, halves)
        widened += cast_model(model, level, half, layers, stay, masters=masters, master_grad=master_grad)
        keep_float32_checkpoints(model, saved_as)
        remember_names(model)
        note_decoration(model, level, half)
    watch_decorated_models()
    for optimizer in optimizer_list:
        widen_state(optimizer, widened)
        attach(optimizer, masters_for_new=masters != "none", compact=masters == "compact", state_dtype=state_dtype)
    check_again()
    return models if optimizers is None else (models, optimizers)


def set_optimizer_state(optimizers: Iterable[Optimizer], dtype: torch.dtype) -> None:
    """Keep the state of optimizers in float32 or bfloat16, also of those whose parameters have no masters."""
    for optimizer in optimizers:
        attach(unwrap_optimizer(optimizer), state_dtype=dtype)


def keep_optimizer_state(optimizers: Iterable[Optimizer], dtype: torch.dtype) -> None:
    """Keep the state of copied optimizers in bfloat16: `copy.deepcopy` and pickle copy it, but not the setting."""
    for optimizer in map(unwrap_optimizer, optimizers):
        if dtype is not torch.float32 and not engine_of(optimizer).attached and stored_dtype(optimizer) is dtype:
            attach(optimizer, state_dtype=dtype)


def watch_decorated_models() -> None:
    """Make conversions, copies, averages and steps in torch respect masters; also called when a model is unpickled."""
    copy_masters_with_parameters()
    follow_conversions()
    average_masters()
    watch_optimizers()


def _find_half_layers(
    models: Sequence[nn.Module], level: str, half_layers: Excluded | Sequence[Excluded] | None, fp8: Any
) -> list[list[nn.Module]]:
    """Return the modules of each model whose products stay in half at O3."""
    if level != "O3":
        for argument, value in (("half_layers", half_layers), ("fp8", fp8)):
            if value is not None:
                raise ValueError(f"{argument} with level={level!r}: it belongs to level O3")
        return [[] for _ in models]
    recipe = Fp8Recipe.of(fp8)
    for device in {param.device for model in models for param in model.parameters() if not param.is_meta}:
        if device.type == "cuda":  # a model on the CPU may still move to a GPU
            refuse_without_fp8(device, recipe.emulate)
    if half_layers is None:
        return [first_and_last(model) for model in models]
    return [find_excluded(model, half_layers, "half_layers") for model in models]
