"""`decorate`: half weights in the module, float32 masters behind them, an optimizer that updates both."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mezzo._torch.layers import BatchNorm, ConvNd, InstanceNorm
from mezzo.amp._averages import average_masters
from mezzo.amp._checkpoint import keep_float32_checkpoints, parse_save_dtype
from mezzo.amp._conversions import follow_conversions
from mezzo.amp._decorated import note_decoration
from mezzo.amp._exclude import Excluded, exclude_layers, find_excluded, is_excluded, refuse_half_without_master
from mezzo.amp._fp8 import first_and_last, keep_in_half
from mezzo.amp._steps import expect_no_master, look_again, watch_optimizers
from mezzo.amp.hardware import warn_if_unsupported
from mezzo.dtypes import HALF_DTYPES, dtype_name, parse_half_dtype, parse_level
from mezzo.fp8 import Fp8Recipe, refuse_without_fp8
from mezzo.optim import (
    attach,
    attach_master,
    copy_masters_with_parameters,
    detach_master,
    is_dtensor,
    kept_of,
    master_of,
    remember_names,
)

_SMALLEST_HALF = 2.0**-25  # half of the smallest float16: below, it rounds to 0
T = TypeVar("T")
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
) -> Any:
    """Store weights in half and keep their float32 masters, in place; return what was given.

    Every argument is checked before anything is changed.

    Args:
        models: A module or a list of them, not yet wrapped for distributed training.
        optimizers: The optimizers of these models. Their `step()` then updates masters and half weights; the same
            objects come back. Without them the masters wait for the first `scaler.step(optimizer)`.
        level: `O2`: all floating parameters except BatchNorm's, and in float16 also LayerNorm's and InstanceNorm's; buffers
            stay float32. `O1`: weights and biases of Linear and convolution layers, which only ever compute in half.
            `O3`: as O2, and the layers whose products stay in half are marked. What a level keeps in float32 and somebody
            made half by hand (`model.half()`) becomes float32 again.
        dtype: `float16` or `bfloat16`.
        master_weight: False updates the half weights themselves, which loses small updates. `compact` keeps of each master
            the 16 bits that its half weight lacks: two bytes a parameter less, and less to read and write in a step.
        save_dtype: Dtype of all floating tensors in `state_dict()`; None gives the float32 masters.
        master_grad: Gradients of half weights arrive and accumulate in float32.
        excluded_layers: Modules, types or name globs that stay in float32, weights and arithmetic.
        excluded_parameters: Parameters that stay float32; what they are used in is the policy's decision.
        half_layers: O3: modules, types or name globs whose products stay in half; None: the first and the last layer,
            `()`: none.
        fp8: O3: the recipe that `auto_cast` will get; looked at for whether the device can follow it.

    Returns:
        The model(s), or the pair (model(s), optimizer(s)) if optimizers were given.

    Raises:
        RuntimeError: A model is wrapped for distributed training already, scripted, decorated in the other dtype, or has
            masters of another kind than `master_weight` asks for.
    """
    level, half = parse_level(level, ("O1", "O2", "O3")), parse_half_dtype(dtype)
    saved_as = parse_save_dtype(save_dtype)
    masters = parse_master_weight(master_weight)
    model_list = _as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _as_list(optimizers, Optimizer, "optimizers")
    for index, model in enumerate(model_list):
        _refuse_wrapped(model, "" if isinstance(models, nn.Module) else f"models[{index}]")
        _refuse_uninitialised(model)
        _refuse_scripted(model)
        _refuse_other_dtype(model, half)
    excluded = [
        [*find_excluded(model, excluded_layers), *(part for part in model.modules() if is_excluded(part))]
        for model in model_list
    ]
    in_half = _find_half_layers(model_list, level, half_layers, fp8)
    stay = _ids_of_parameters(excluded_parameters, model_list)
    for layers in excluded:
        refuse_half_without_master(layers)
    if masters == "compact":
        _refuse_sharded(model_list)
    if master_weight is not None:
        _refuse_other_masters(model_list, masters)
    if master_grad and not _HAS_GRAD_DTYPE:
        raise RuntimeError("master_grad=True needs Tensor.grad_dtype, which this torch does not have")

    _warn_about_strangers(model_list, optimizer_list)
    if masters == "none" and half is torch.float16:
        _warn_about_vanishing_eps(optimizer_list)
    if torch.cuda.is_initialized():
        warn_if_unsupported(half)
    widened: list[nn.Parameter] = []
    for model, layers, halves in zip(model_list, excluded, in_half, strict=True):
        exclude_layers(model, layers)
        keep_in_half(model, halves)
        widened += _cast_model(model, level, half, layers, stay, masters=masters, master_grad=master_grad)
        keep_float32_checkpoints(model, saved_as)
        remember_names(model)
        note_decoration(model, level, half)
    watch_decorated_models()
    for optimizer in optimizer_list:
        _widen_state(optimizer, widened)
        attach(optimizer, masters_for_new=masters != "none", compact=masters == "compact")
    look_again()
    return models if optimizers is None else (models, optimizers)


def watch_decorated_models() -> None:
    """Teach torch about masters: conversions, copies, averages and steps; also where a decorated model is unpickled."""
    copy_masters_with_parameters()
    follow_conversions()
    average_masters()
    watch_optimizers()


def parse_master_weight(master_weight: Any) -> str:
    """Return which masters are wanted: `full`, `compact` or `none`.

    Raises:
        ValueError: It says nothing of the kind.
    """
    if isinstance(master_weight, str) and master_weight == "compact":
        return "compact"
    if master_weight is None or isinstance(master_weight, bool):
        return "none" if master_weight is False else "full"
    raise ValueError(f"master_weight={master_weight!r}: must be True, False or 'compact'")


def _refuse_sharded(models: Iterable[nn.Module]) -> None:
    for name, param in (named for model in models for named in model.named_parameters()):
        if is_dtensor(param):
            raise RuntimeError(
                f"master_weight='compact': {name!r} is a DTensor, whose master must be a whole one; use True"
            )


def _refuse_other_masters(models: Iterable[nn.Module], masters: str) -> None:
    """Raise RuntimeError if a parameter has a master of another kind than is asked for.

    Where none is asked for, the masters are not dropped: the weights would lose what was trained into them.
    """
    for name, param in (named for model in models for named in model.named_parameters()):
        kept = kept_of(param)
        has = None if kept is None else "full" if kept.is_floating_point() else "compact"
        if has is not None and masters == "none":
            raise RuntimeError(
                f"master_weight=False: {name!r} has a {has} master already; leave master_weight out to go on with it, or call "
                "model.float() first"
            )
        if has is not None and has != masters:
            raise RuntimeError(f"{name!r} has a {has} master already; a {masters} one was asked")


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
        if device.type == "cuda":  # on the CPU a model may be on its way to a GPU
            refuse_without_fp8(device, recipe.emulate)
    if half_layers is None:
        return [first_and_last(model) for model in models]
    return [find_excluded(model, half_layers, "half_layers") for model in models]


def _as_list(value: Any, kind: type[T], argument: str) -> list[T]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{argument}: {type(item).__name__} is no {kind.__name__}; give one or a list of them")
    return items


def _ids_of_parameters(excluded: Iterable[nn.Parameter], models: Iterable[nn.Module]) -> set[int]:
    known = {id(param) for model in models for param in model.parameters()}
    for param in (chosen := list(excluded)):
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"excluded_parameters: {type(param).__name__} is no Parameter; names go into excluded_layers"
            )
        if id(param) not in known:
            raise ValueError(
                f"excluded_parameters: one of shape {list(param.shape)} belongs to no model that was given"
            )
    return {id(param) for param in chosen}


def _wrapper_types() -> tuple[type, ...]:
    """Return the classes of distributed wrappers; one that was never imported has no instances."""
    kinds: list[type] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds += [getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name)]
    return tuple(kinds)


def _refuse_wrapped(model: nn.Module, prefix: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _wrapper_types()):
            path = ".".join(part for part in (prefix, name) if part) or "the model itself"
            raise RuntimeError(
                "call mezzo.amp.decorate() first, then wrap with DistributedDataParallel; "
                f"found {type(module).__name__} at {path}"
            )


def _refuse_uninitialised(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise RuntimeError(f"{name!r} has no shape yet (a lazy module): run the model once, then decorate it")
        if torch.is_inference_mode_enabled() or param.is_inference():
            raise RuntimeError("decorate() prepares training: call it outside torch.inference_mode()")


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RuntimeError(f"{name or 'the model'!r} is a TorchScript module: decorate the model, then script it")


def _refuse_other_dtype(model: nn.Module, half: torch.dtype) -> None:
    for name, param in model.named_parameters():
        if param.dtype in HALF_DTYPES and param.dtype is not half:
            raise RuntimeError(f"{name!r} is {dtype_name(param.dtype)} already; {dtype_name(half)} was asked")


def _keeps_float32(module: nn.Module, half: torch.dtype) -> bool:
    """Whether a module's own tensors stay float32 at O2."""
    if isinstance(module, BatchNorm):
        return True
    return half is torch.float16 and isinstance(module, (nn.LayerNorm, InstanceNorm))


def _own_parameters(module: nn.Module, level: str) -> list[nn.Parameter]:
    """Return a module's own parameters that a level may cast."""
    if level == "O1" and not isinstance(module, (nn.Linear, ConvNd)):
        return []
    return [param for param in module._parameters.values() if param is not None]


def _cast_model(
    model: nn.Module,
    level: str,
    half: torch.dtype,
    excluded: Iterable[nn.Module],
    excluded_parameters: set[int],
    *,
    masters: str,
    master_grad: bool,
) -> list[nn.Parameter]:
    """Cast what a level casts; return the half parameters that became float32, because the level keeps them so."""
    kept_modules = {id(module) for layer in excluded for module in layer.modules()}
    kept_modules |= {id(module) for module in model.modules() if _keeps_float32(module, half)}
    # A parameter shared with a module that stays float32 stays float32: tied weights are one object.
    kept = {id(param) for m in model.modules() if id(m) in kept_modules for param in _own_parameters(m, "O2")}
    kept |= excluded_parameters
    chosen = {id(param) for m in model.modules() for param in _own_parameters(m, level)} - kept
    widened: list[nn.Parameter] = []
    for param in model.parameters():
        if id(param) not in chosen:
            if param.dtype is half:  # made half by hand, or by another level
                _widen_parameter(param)
                widened.append(param)
        elif param.dtype in (torch.float32, half):
            _cast_parameter(param, half, masters, master_grad)
    _widen_buffers(model, half)
    return widened


def _widen_buffers(model: nn.Module, half: torch.dtype) -> None:
    """Make half buffers float32: rotary frequencies, positions and masks in half are wrong without a word."""
    wide: dict[int, Tensor] = {}  # a buffer that two modules share stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is half:
                master = master_of(buffer)  # of a decorated model that was converted by hand
                module._buffers[name] = wide.setdefault(id(buffer), buffer.float() if master is None else master)


@torch.no_grad()
def _widen_parameter(param: nn.Parameter) -> None:
    """Make a half parameter float32 in place: with the bits of its master, where it has one."""
    master, grad = master_of(param), param.grad
    detach_master(param)
    param.grad = None
    param.data = param.data.float() if master is None else master
    if grad is not None:
        param.grad = grad.float()


def _widen_state(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Bring an optimizer's half state of parameters that are float32 now to float32."""
    for state in (optimizer.state[param] for param in params if param in optimizer.state):
        state.update({key: t.float() for key, t in state.items() if isinstance(t, Tensor) and t.dtype in HALF_DTYPES})


@torch.no_grad()
def _cast_parameter(param: nn.Parameter, half: torch.dtype, masters: str, master_grad: bool) -> None:
    """Make a parameter half in place: the object, and every optimizer that holds it, stay valid."""
    if param.dtype is torch.float32:
        value, grad = param.data, param.grad
        param.grad = None
        param.data = value.to(half)
        if masters != "none":
            attach_master(param, value, compact=masters == "compact")
        if grad is not None:
            param.grad = grad.to(half)
    elif masters != "none" and kept_of(param) is None:
        attach_master(param, compact=masters == "compact")
    if masters == "none":
        expect_no_master(param)
    if master_grad:
        param.grad_dtype = torch.float32


def _warn_about_vanishing_eps(optimizers: Iterable[Optimizer]) -> None:
    """Warn if an optimizer's `eps` is 0 in float16: without float32 masters it divides by it."""
    for optimizer in optimizers:
        eps = {group["eps"] for group in optimizer.param_groups if isinstance(group.get("eps"), float)}
        if any(0 < value < _SMALLEST_HALF for value in eps):
            warnings.warn(
                f"decorate(master_weight=False): eps={min(eps)} of this {type(optimizer).__name__} is 0 in float16, so its "
                "updates become NaN; keep the float32 masters, use bfloat16, or give eps=1e-4",
                UserWarning,
                stacklevel=3,
            )


def _warn_about_strangers(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        if not any(id(param) in known for group in optimizer.param_groups for param in group["params"]):
            warnings.warn(
                f"decorate: this {type(optimizer).__name__} has no parameter of the models given; build it from their "
                "parameters()",
                UserWarning,
                stacklevel=3,
            )
