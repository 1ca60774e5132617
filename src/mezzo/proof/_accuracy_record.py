"""Record the values and gradients of one step for `compare_accuracy`."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mezzo._arguments import check_at_least
from mezzo._torch.layers import DropoutNd
from mezzo.amp import GradScaler, auto_cast, float32_copy
from mezzo.dtypes import dtype_name, parse_half_dtype
from mezzo.fp8 import recipe_for
from mezzo.precision import Precision
from mezzo.proof._accuracy_run import (
    AccuracyRun,
    ModuleCall,
    Output,
    ParameterGrad,
    TensorRecord,
    coarsest,
    sample_places,
)
from mezzo.record import ModuleListener, listening_to_modules, operator_log
from mezzo.trial import call_model

MAX_ELEMENTS = 2**16
"""Kept elements of a tensor: 256 KiB."""


class HasScale(Protocol):
    """A loss scaler of mezzo or torch."""

    def get_scale(self) -> float:
        """Return the loss scale."""
        ...


def record_run(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    name: str = "run",
    loss_scale: float | HasScale = 1.0,
    max_elements: int = MAX_ELEMENTS,
) -> AccuracyRun:
    """Run a step and record the outputs of all modules and all gradients.

    The recording changes neither the model nor a random state; its hooks are removed even if the step raises. What
    activation checkpointing computes again in the backward pass is not recorded again.

    Args:
        model: The eager model that the step uses, not a result of `torch.compile`.
        step: Runs the forward pass and, to compare gradients, the backward pass. Returns the unscaled loss or None.
        name: Name of the run in tables.
        loss_scale: Factor of the loss in the backward pass: a number or the scaler. Gradients are divided by it.
        max_elements: Larger tensors are kept as a sample of this size, which is the same in every run. Counts of NaN and
            inf and the largest magnitude always cover the whole tensor.

    Raises:
        ValueError: The loss scale is not a positive number, or the step called no module of the model.
        TypeError: The step returned something other than a loss.
    """
    scale = _read_scale(loss_scale)
    check_at_least("max_elements", max_elements)
    recorder = _Recorder(scale, max_elements)
    with recorder, listening_to_modules(model, recorder):
        loss = _read_loss(step())
    if not recorder.calls:
        raise ValueError("the step called no module of the model; pass the eager model, not a compiled one")
    return AccuracyRun(
        name=name,
        loss=loss,
        loss_scale=scale,
        max_elements=max_elements,
        modules={path: type(module).__name__ for path, module in model.named_modules()},
        calls=tuple(call.finished() for call in recorder.calls),
        parameters=tuple(sorted(recorder.parameters.values(), key=lambda each: each.order)),
    )


@operator_log.paused()
def run_at(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    level: str = "O1",
    dtype: str | torch.dtype = "float16",
    loss_scale: float | None = None,
    name: str | None = None,
    seed: int = 0,
    max_elements: int = MAX_ELEMENTS,
    **options: Any,
) -> AccuracyRun:
    """Record one forward and backward pass of a copy of a model at a level; the model is unchanged.

    Every call starts from the same float32 weights (the masters of a decorated model), buffers, mode and seed, so two
    runs differ only in precision. Dropout is off, because on a GPU its mask depends on the dtype. Global random states
    are restored.

    Args:
        model: In training or evaluation mode.
        inputs: A tuple or list of positional arguments, a dict of named ones, or the only argument.
        targets: Second argument of `loss_fn`.
        loss_fn: Called as `loss_fn(model(inputs), targets)`, in the region.
        level: `O0` is float32; `OD`, `O1`, `O2` and `O3` as in `auto_cast`. At O2 and O3 the copy is decorated; a device
            without FP8 products emulates them.
        dtype: `float16` or `bfloat16`.
        loss_scale: None: 2^15 for float16, otherwise 1.
        name: Name of the run in tables; None: level and dtype.
        seed: Seed of the forward pass.
        max_elements: See `record_run`.
        options: Further arguments of `mezzo.Precision`, such as `custom_black_list`.
    """
    device = next((each.device for each in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
    level = level.upper() if isinstance(level, str) else level
    if level == "O3":
        options = {**options, "fp8": recipe_for(device, options.get("fp8"))}
    is_scaled = level != "O0" and parse_half_dtype(dtype) is torch.float16
    scale = (2.0**15 if is_scaled else 1.0) if loss_scale is None else loss_scale
    half_weights = False if level == "O1" else None  # so that O1 differs from O0 in its casts only
    scaler = GradScaler(enable=scale != 1.0, init_loss_scaling=scale)
    precision = Precision(level, dtype, half_weights=half_weights, scaler=scaler, **options)
    copied = float32_copy(model).to(device)
    copied.zero_grad()
    for module in copied.modules():
        if isinstance(module, DropoutNd):
            module.eval()
    precision.prepare(copied)
    own_inputs = copy.deepcopy(inputs)  # a network may change them in place

    def step() -> Tensor:
        with precision.autocast():
            loss = loss_fn(call_model(copied, own_inputs), targets)
        precision.backward(loss.float())
        return loss

    label = "float32" if level == "O0" else f"{level} {dtype_name(precision.dtype)}"
    with _seeded(device, seed):
        return record_run(copied, step, name=name or label, loss_scale=scale, max_elements=max_elements)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and of one device, and restore them afterwards."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _read_scale(loss_scale: float | HasScale) -> float:
    scale = float(loss_scale) if isinstance(loss_scale, (int, float)) else float(loss_scale.get_scale())
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"loss_scale={scale}: must be a positive number")
    return scale


def _read_loss(loss: Any) -> float | None:
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        return float(loss)
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(f"step returned {what}; must return the loss (a number, or a tensor with one element) or None")


def tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in tuples, lists, mappings and dataclasses, with their positions.

    >>> [place for place, _ in tensors_in({"a": (torch.ones(1), 3), "b": torch.ones(1)})]
    ["['a'][0]", "['b']"]
    """
    if isinstance(value, Tensor):
        if (value.is_floating_point() or value.is_complex()) and not value.is_nested:
            yield place, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        for position, each in enumerate(value):
            yield from tensors_in(each, f"{place}.{names[position]}" if names else f"{place}[{position}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name), f"{place}.{each.name}")


def record_tensor(tensor: Tensor, max_elements: int, scale: float = 1.0) -> TensorRecord:
    """Return the record of a tensor divided by `scale`."""
    with auto_cast(enable=False), torch.no_grad():  # the surrounding region must not cast these operators
        whole = tensor.detach()
        whole = whole.to_dense() if whole.layout is not torch.strided else whole
        flat = (torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole).reshape(-1)
        flat = flat.float()
        magnitudes = torch.where(flat.isfinite(), flat.abs(), 0.0)
        largest = magnitudes.max() if flat.numel() else flat.new_zeros(())
        num_nan, num_inf, max_abs = torch.stack(
            [flat.isnan().sum().double(), flat.isinf().sum().double(), largest.double()]
        ).tolist()
        places = sample_places(flat.numel(), max_elements)
        kept = flat if places is None else flat[places.to(flat.device)]
        values = kept.to("cpu", copy=True)
        shape = (*whole.shape, 2) if whole.is_complex() else tuple(whole.shape)
        return TensorRecord(
            shape=shape,
            dtype=dtype_name(tensor.dtype),
            num_nan=int(num_nan),
            num_inf=int(num_inf),
            max_abs=max_abs / scale,
            values=values if scale == 1.0 else values.div_(scale),
        )


@dataclass(slots=True, eq=False)
class _OutputSlot:
    """An output, and its gradient once the backward pass computes it."""

    value: TensorRecord
    grad: TensorRecord | None = None
    order: int = -1


@dataclass(slots=True, eq=False)
class _Frame:
    """A running or finished call."""

    path: str
    module: nn.Module
    occurrence: int
    inputs: tuple[TensorRecord, ...]
    rounding: str
    outputs: list[tuple[str, _OutputSlot, bool]] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)

    def finished(self) -> ModuleCall:
        outputs = tuple(
            Output(place, slot.value, slot.grad, slot.order, is_passed_on) for place, slot, is_passed_on in self.outputs
        )
        kind = type(self.module).__name__
        return ModuleCall(self.path, kind, self.occurrence, self.rounding, self.inputs, outputs, tuple(self.inner))


class _Recorder(ModuleListener, ExitStack):
    """Keeps the values and gradients of one step; as a context it removes its hooks on tensors."""

    def __init__(self, scale: float, max_elements: int) -> None:
        super().__init__()
        self.calls: list[_Frame] = []
        self.parameters: dict[str, ParameterGrad] = {}
        self._scale, self._max_elements = scale, max_elements
        self._stack: list[_Frame] = []
        self._times: Counter[str] = Counter()
        self._order = itertools.count()
        self._no_version = itertools.count(-1, -1)
        self._known: dict[int, tuple[weakref.ref[Tensor], int, TensorRecord, _OutputSlot | None]] = {}

    def enter_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        self._times[path] += 1
        inputs = tuple(self._record(tensor)[0] for tensor in given)
        own = [each for each in module.parameters(recurse=False) if each.is_floating_point()]
        rounding = coarsest("float64", *(_rounding(each) for each in (*given, *own)))
        self._stack.append(_Frame(path, module, self._times[path], inputs, rounding))

    def leave_module(self, path: str, module: nn.Module, output: Any) -> None:
        if all(frame.module is not module for frame in self._stack):  # the call began before the recording
            return
        while (frame := self._stack.pop()).module is not module:
            pass  # a call inside raised, and the model went on
        for place, tensor in tensors_in(output):
            slot, is_passed_on = self._slot(tensor)
            frame.outputs.append((place, slot, is_passed_on))
            frame.rounding = coarsest(frame.rounding, _rounding(tensor))
        if self._stack:
            self._stack[-1].inner.append(len(self.calls))
        self.calls.append(frame)

    def accumulate_grad(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            grad = record_tensor(parameter.grad, self._max_elements, self._scale)
            self.parameters[name] = ParameterGrad(name, name.rpartition(".")[0], next(self._order), grad)

    def _record(self, tensor: Tensor) -> tuple[TensorRecord, _OutputSlot | None]:
        """Return the record of a tensor, and its slot if a call returned it; a known tensor is not copied again."""
        version = next(self._no_version) if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2], known[3]
        record = record_tensor(tensor, self._max_elements)
        self._known[id(tensor)] = (weakref.ref(tensor), version, record, None)
        return record, None

    def _slot(self, tensor: Tensor) -> tuple[_OutputSlot, bool]:
        """Return the slot of an output, and whether the tensor was already known."""
        before = self._known.get(id(tensor))
        record, slot = self._record(tensor)
        is_passed_on = before is not None and before[2] is record
        if slot is None:
            slot = _OutputSlot(record)
            reference, version, record, _ = self._known[id(tensor)]
            self._known[id(tensor)] = (reference, version, record, slot)
            if tensor.requires_grad:
                self.callback(tensor.register_hook(self._keep_grad(slot)).remove)
        return slot, is_passed_on

    def _keep_grad(self, slot: _OutputSlot) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            slot.grad, slot.order = record_tensor(grad, self._max_elements, self._scale), next(self._order)

        return keep


def _rounding(tensor: Tensor) -> str:
    """Return the coarsest dtype that an operator on a tensor may round to."""
    kind = tensor.device.type
    own = dtype_name(tensor.dtype)
    if torch.is_autocast_enabled(kind) and tensor.dtype is not torch.float64:
        return coarsest(own, dtype_name(torch.get_autocast_dtype(kind)))
    if kind == "cuda" and own == "float32" and _tf32_is_on():
        return "tensorfloat32"
    return own


def _tf32_is_on() -> bool:
    return torch.get_float32_matmul_precision() != "highest" or bool(torch.backends.cudnn.allow_tf32)
