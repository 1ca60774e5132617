"""`predict_memory`: the peak memory of a training step, before it runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from mezzo._torch.allocations import AllocationCounter
from mezzo._torch.fake_tensors import FakeTensorMode, no_report_of_misfits
from mezzo._torch.pytree import tree_leaves, tree_map
from mezzo._torch.storages import storage_id
from mezzo.amp import Fp8Recipe
from mezzo.devices import find_device
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.errors import MezzoError
from mezzo.fp8 import recipe_for, recipe_from_text
from mezzo.precision import Precision
from mezzo.report import markdown_table
from mezzo.trial import Workload, arguments_of

GIB = 2**30
OPTIMIZERS: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""The moments that an optimizer keeps per parameter."""
SMALLEST_BLOCK = 512
"""torch's CUDA allocator rounds sizes up to multiples of this many bytes."""
WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on a GPU, which torch allocates with the first product: 32 MiB from Hopper on, less before."""
CONTEXT_BYTES = GIB // 2
"""What CUDA and its loaded kernels need outside of torch's allocator: 0.4 to 0.6 GiB."""
FRAGMENTATION = 0.04
"""The share of memory that blocks of unequal sizes leave unused; the allocator returns it only when it must."""


class MemoryPredictionError(MezzoError):
    """A step cannot run without numbers, so its memory cannot be predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPrediction:
    """Bytes of one training step, by what they are for."""

    name: str
    """The precision, and options that save memory."""
    weights: int
    """Parameters and buffers, as the forward pass uses them."""
    masters: int
    """Float32 masters of half weights, or the rests of compact ones."""
    optimizer_state: int
    gradients: int
    """Of all trainable parameters, as they are before the update."""
    batch: int
    """Inputs and targets."""
    activations: int
    """What the forward pass leaves for the backward pass."""
    forward_backward: int
    """The highest memory of forward and backward pass besides weights, state and batch; has gradients in it."""
    update: int = 0
    """Float32 temporaries of the update, where torch's fused kernels take it."""
    fp8_copies: int = 0
    """O3: FP8 copies of weights, plain and transposed."""
    workspace: int = 0
    """Workspace of the device's libraries."""

    @property
    def peak(self) -> int:
        """The highest memory of a step that is not the first: the optimizer's state exists."""
        kept = self.weights + self.masters + self.fp8_copies + self.optimizer_state + self.batch + self.workspace
        return kept + max(self.forward_backward, self.gradients + self.update)

    def fits(self, memory_bytes: float, *, is_cuda: bool = True) -> bool:
        """Return whether a device with so much memory can take the step."""
        reserve = CONTEXT_BYTES if is_cuda else 0
        return self.peak * (1 + FRAGMENTATION) + reserve <= memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "peak": self.peak}


def predict_memory(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    precision: Precision | None = None,
    optimizer: str | Optimizer = "adamw",
    device: str | torch.device | None = None,
    on_gpu: bool | None = None,
) -> MemoryPrediction:
    """Return the memory of one training step, which is not run: tensors have shapes, and no numbers.

    Forward and backward pass run on fake tensors under the policy. Weights, masters, gradients and state are counted.

    Args:
        model: The float32 model, before `prepare`; it may be on the meta device. It is unchanged.
        inputs: One batch: a tuple of positional arguments, a dict of named ones, or the only argument.
        targets: Second argument of `loss_fn`.
        loss_fn: None: the mean square of all floating tensors in the output.
        precision: Level, dtype, masters and optimizer state; None: float32.
        optimizer: `sgd`, `momentum` (SGD with momentum), `adam` or `adamw`; or your SGD, Adam or AdamW.
        device: Where the step would run; None: the GPU if there is one.
        on_gpu: Whether to predict for a GPU; None: if `device` is one. Without a GPU at hand, the kernels are those of the
            CPU, and compute in half.

    Raises:
        MemoryPredictionError: The model reads numbers, for example by `.item()`, which fake tensors do not have.
        ValueError: The optimizer is unknown, or the model is not float32.
    """
    precision = Precision("O0") if precision is None else precision
    place = find_device(device, "device={!r}")
    is_cuda = place.type == "cuda" if on_gpu is None else on_gpu
    moments = _count_moments(optimizer)
    _refuse_half(model)
    dtypes = precision.weight_dtypes(model)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    in_half = [name for name, dtype in dtypes.items() if dtype in HALF_DTYPES]
    try:
        with no_report_of_misfits():
            step = _FakeStep(model, dtypes, precision, place, is_cuda)
            activations, counter = step.run(inputs, targets, loss_fn or mean_square)
    except Exception as error:  # the user's code may raise anything
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise MemoryPredictionError(
            f"the step cannot run without numbers ({type(error).__name__}: {reason}), so its memory cannot be predicted; "
            "measure a step instead"
        ) from error
    params = dict(model.named_parameters())
    elements = sum(param.numel() for param in trained.values())
    master_bytes = {None: 4, True: 4, "compact": 2, False: 0}[precision.master_weight]
    state_bytes = 2 if precision.optimizer_state is torch.bfloat16 else 4
    return MemoryPrediction(
        name=_name_of(precision),
        weights=sum(param.numel() * dtypes[name].itemsize for name, param in params.items())
        + sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers()),
        masters=master_bytes * sum(params[name].numel() for name in in_half),
        optimizer_state=moments * state_bytes * elements,
        gradients=sum(param.numel() * dtypes[name].itemsize for name, param in trained.items()),
        batch=sum(leaf.numel() * leaf.dtype.itemsize for leaf in _tensors((inputs, targets))),
        activations=activations,
        forward_backward=counter.peak_bytes,
        fp8_copies=0 if precision.master_weight is False else counter.copies_bytes,
        update=0 if is_cuda else _update_bytes(precision, trained, in_half, moments),
        workspace=WORKSPACE_BYTES if is_cuda else 0,
    )


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU, or of the machine, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Predictions of a workload, and whether they fit in a device's memory; print it."""

    predictions: tuple[MemoryPrediction, ...]
    """Float32, the level, and the level with less memory for masters and state. Empty if there is a `reason`."""
    optimizer: str
    memory_bytes: int
    is_cuda: bool
    reason: str = ""
    """Why nothing could be predicted."""

    def fits(self, prediction: MemoryPrediction) -> bool:
        """Return whether a prediction fits in the memory."""
        return prediction.fits(self.memory_bytes, is_cuda=self.is_cuda)

    @property
    def level_fits(self) -> bool:
        """Whether the level fits, without options that save memory."""
        return len(self.predictions) > 1 and self.fits(self.predictions[1])

    def table(self) -> list[list[str]]:
        """Return a header and one row per prediction."""
        names = ("weights", "masters", "optimizer_state", "gradients", "activations", "peak")
        header = [
            "setting",
            *(name.removeprefix("optimizer_") for name in names),
            f"in {self.memory_bytes / GIB:.1f} GiB",
        ]
        rows = [
            [
                each.name,
                *(_size_text(getattr(each, name)) for name in names),
                "fits" if self.fits(each) else "does not fit",
            ]
            for each in self.predictions
        ]
        return [header, *rows]

    def __str__(self) -> str:
        if self.reason:
            return f"memory: {self.reason}"
        return f"predicted memory of a step with {self.optimizer}\n{markdown_table(self.table())}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "optimizer": self.optimizer,
            "memory_bytes": self.memory_bytes,
            "predictions": [{**each.to_dict(), "fits": self.fits(each)} for each in self.predictions],
            "reason": self.reason,
        }


def predict_fit(
    workload: Workload,
    *,
    level: str,
    dtype: str = "float16",
    fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    device: torch.device | None = None,
    memory_gib: float | None = None,
) -> MemoryReport:
    """Predict a workload's step in float32, at a level, and at the level with compact masters and bfloat16 state.

    Args:
        workload: Model, batch and loss.
        level: O1, O2 or O3.
        dtype: float16 or bfloat16.
        fp8: O3: the recipe.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        device: Where the step would run; None: a GPU, also if there is none at hand.
        memory_gib: Memory of the device that is asked about; None: that of `device`.

    Raises:
        ValueError: A value is not allowed.
    """
    if memory_gib is not None and not memory_gib > 0:
        raise ValueError(f"--memory {memory_gib}: must be above 0")
    place = find_device(device)
    is_cuda = device is None or device.type == "cuda"
    memory = memory_of(place) if memory_gib is None else int(memory_gib * GIB)
    precision = Precision(level, dtype, fp8=recipe_for(place, fp8) if level == "O3" else None)
    try:
        full, half = (
            predict_memory(
                workload.model, workload.inputs, workload.targets, workload.loss_fn,
                precision=each, optimizer=optimizer, device=place, on_gpu=is_cuda,
            )
            for each in (None, precision)
        )  # fmt: skip
    except MemoryPredictionError as error:
        return MemoryReport(
            predictions=(), optimizer=optimizer, memory_bytes=memory, is_cuda=is_cuda, reason=str(error)
        )
    # Compact masters and bfloat16 state change only stored bytes.
    found = [full, half]
    if half.masters:
        found.append(replace(half, name=f"{half.name}, compact masters", masters=half.masters // 2))
    if half.optimizer_state:
        state = half.optimizer_state // 2
        found.append(replace(found[-1], name=f"{found[-1].name}, bfloat16 state", optimizer_state=state))
    return MemoryReport(predictions=tuple(found), optimizer=optimizer, memory_bytes=memory, is_cuda=is_cuda)


def mean_square(output: Any, _: Any) -> Tensor:
    """Return the mean square of all floating tensors in an output: the default loss."""
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not values:
        raise ValueError("the model's output has no floating tensor; pass loss_fn and targets")
    return torch.stack([value.float().square().mean() for value in values]).mean()


def _size_text(count: int) -> str:
    for name, unit, digits in (("GiB", GIB, 2), ("MiB", 2**20, 1)):
        if count >= unit // 10:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count / 2**10:.1f} KiB" if count else "0"


class _StepCounter(AllocationCounter):
    """Also knows the operands of FP8 products, which exist only inside of their operators."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__(known)
        self._copied: dict[int, int] = {}

    @property
    def copies_bytes(self) -> int:
        """Bytes of the FP8 copies of weights, plain and transposed, which stay."""
        return sum(self._copied.values())

    def inside(self, operator: Any, args: Any) -> int:
        """Return the bytes of FP8 operands: one byte per number of the input, two per number of the gradient."""
        if operator is torch.ops.mezzo.fp8_linear.default:
            values, weight, recipe = args[0], args[1], args[3]
            if recipe_from_text(recipe).granularity == "tensor":  # others are converted in each call
                self._copied[storage_id(weight.untyped_storage())] = 2 * weight.numel()
            return int(values.numel())
        if operator is torch.ops.mezzo.fp8_linear_backward.default:
            return 2 * int(args[0].numel())
        return 0


class _FakeStep:
    """Forward and backward pass of a model on fake tensors."""

    def __init__(
        self,
        model: nn.Module,
        dtypes: dict[str, torch.dtype],
        precision: Precision,
        device: torch.device,
        is_for_gpu: bool,
    ) -> None:
        self._device, self._precision = device, precision
        self._mode = FakeTensorMode()
        memo: dict[int, Any] = {}
        with self._mode:
            for name, param in model.named_parameters():
                fake = self._fake(param, dtypes[name])
                memo[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
            for buffer in model.buffers():
                memo.setdefault(id(buffer), self._fake(buffer, buffer.dtype))
            self._known: list[Tensor] = list(memo.values())
            # A copy without numbers: deepcopy takes parameters and buffers from the memo
            self._model = copy.deepcopy(model, memo)
        if not self._model.training:  # otherwise keep the mode of each module: frozen parts stay frozen
            self._model.train()
        precision.prepare_for_evaluation(self._model)
        policy = precision.policy
        if policy is not None and is_for_gpu and device.type == "cpu":
            policy = replace(policy, cpu_compute="native")
        self._region = precision.autocast() if policy is None else Precision(policy=policy).autocast()

    def _fake(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a fake tensor of the same layout on the device."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)

    def run(self, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor]) -> tuple[int, _StepCounter]:
        """Return the bytes that the forward pass leaves, and the count of both passes."""
        args, kwargs = arguments_of(self._model, inputs)
        with self._mode, torch.enable_grad():
            args, kwargs, targets = tree_map(self._as_fake, (args, kwargs, targets))
            if isinstance(loss_fn, nn.Module):
                loss_fn = copy.deepcopy(loss_fn, {id(t): self._fake(t, t.dtype) for t in _tensors_of(loss_fn)})
            self._known += _tensors((args, kwargs, targets))
            return self._count(args, kwargs, targets, loss_fn)

    def _as_fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self._fake(leaf, leaf.dtype).requires_grad_(leaf.requires_grad)

    def _count(
        self, args: Any, kwargs: Any, targets: Any, loss_fn: Callable[[Any, Any], Tensor]
    ) -> tuple[int, _StepCounter]:
        counter = _StepCounter(self._known)
        with counter:
            with self._region:
                loss = loss_fn(self._model(*args, **kwargs), targets)
            activations = counter.live_bytes
            loss.backward()
        return activations, counter


def _tensors_of(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _refuse_half(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.dtype in HALF_DTYPES:
            raise ValueError(f"{name!r} is {dtype_name(param.dtype)}: give the float32 model, before prepare")


def _count_moments(optimizer: str | Optimizer) -> int:
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if type(optimizer) is SGD:
        return 1 if any(group["momentum"] for group in optimizer.param_groups) else 0
    if isinstance(optimizer, Adam | AdamW):
        return 3 if any(group["amsgrad"] for group in optimizer.param_groups) else 2
    raise ValueError(f"optimizer={optimizer!r}: must be one of {', '.join(OPTIMIZERS)}, or an SGD, Adam or AdamW")


def _name_of(precision: Precision) -> str:
    parts = ["float32" if precision.policy is None else precision.name]
    parts += ["compact masters"] if precision.master_weight == "compact" else []
    parts += ["bfloat16 state"] if precision.optimizer_state is torch.bfloat16 else []
    return ", ".join(parts)


def _update_bytes(precision: Precision, trained: dict[str, Any], in_half: list[str], moments: int) -> int:
    """Return the float32 temporaries of torch's fused kernels: gradients, compact masters and bfloat16 state."""
    half: int = sum(trained[name].numel() for name in in_half if name in trained)
    everything: int = sum(param.numel() for param in trained.values())
    wide = 4 * half * (2 if precision.master_weight == "compact" else 1)
    return wide + (4 * moments * everything if precision.optimizer_state is torch.bfloat16 else 0)
