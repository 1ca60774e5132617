"""One training step, and how to try a step and undo everything that it changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import GradScaler, Policy, current_policy
from mezzo.dtypes import HALF_DTYPES, LEVELS, dtype_name
from mezzo.errors import MezzoError
from mezzo.fp8 import histories_of
from mezzo.optim import stored_master
from mezzo.precision import Precision
from mezzo.static._average import WeightAverage
from mezzo.static._processes import Processes
from mezzo.static._region import CastRules, casting_region
from mezzo.static._window import AccumulationWindow

Loss = Callable[..., Any]
Compute = Callable[..., tuple[Tensor, ...]]

_TYPES_DIFFER = re.compile(r"dtype|scalar type|same type|type .* should be the same")
"""Words of torch's errors about tensors of different dtypes."""
_NAMES_HALF = re.compile(r"\b(half|bfloat16|float16)(tensor)?\b", re.IGNORECASE)
_NAMES_FLOAT32 = re.compile(r"\bfloat(32)?(tensor)?\b", re.IGNORECASE)
_NAMES_OTHER = re.compile(r"\b(Long|Int|Short|Byte|Char|Bool|Double)(Tensor)?\b|\bu?int\d+\b|\bfloat64\b")
"""Dtypes that no policy casts."""


def precision_of_step(
    precision: Precision | None, policy: Any, scaler: GradScaler | None, model: nn.Module
) -> Precision:
    """Return the precision of a step: the given one, or a new one with the policy and the scaler.

    Raises:
        TypeError: Both were given, or `policy` is neither a level nor a policy.
    """
    if precision is None:
        no_scaling = GradScaler(enable=False)  # None means that the user scales nothing, not 'the default scaler'
        policy = policy_of(policy, model)
        return Precision(policy=policy or Policy.create("O0"), scaler=scaler or no_scaling)
    if policy is not None or scaler is not None:
        raise TypeError("precision: give it instead of policy and scaler, not with them")
    if not isinstance(precision, Precision):
        raise TypeError(
            f"precision: {type(precision).__name__} is not a mezzo.Precision; make one, such as mezzo.Precision('O2')"
        )
    return precision


def policy_of(policy: Any, model: nn.Module) -> Policy | None:
    """Return the policy of a step; a level takes the dtype of the model's half weights.

    Raises:
        TypeError: `policy` is neither a level nor a policy.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy.upper() not in LEVELS:
        raise TypeError(
            f"policy={policy!r}: must be a level ({', '.join(LEVELS)}), or a Policy from mezzo.amp.Policy.create(level, dtype)"
        )
    half = next((p.dtype for p in model.parameters() if p.dtype in HALF_DTYPES), torch.float16)
    return Policy.create(policy, half)


def forward_and_loss(model: nn.Module, loss_fn: Loss, num_inputs: int | None = None) -> Compute:
    """Return a function from a batch (inputs, then targets) to the results of `loss_fn`.

    Args:
        model: Gets the inputs.
        loss_fn: Gets the model's output, and the targets.
        num_inputs: How many tensors are inputs; None: all but the last.
    """

    def compute(*batch: Tensor) -> tuple[Tensor, ...]:
        split = len(batch) - 1 if num_inputs is None else num_inputs
        result = loss_fn(model(*batch[:split]), *batch[split:])
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    return compute


def modules_of(model: nn.Module, loss_fn: Loss) -> list[nn.Module]:
    """Return what a step changes and a trial must restore: the model, and a loss with buffers of its own."""
    return [model, loss_fn] if isinstance(loss_fn, nn.Module) and loss_fn is not model else [model]


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step may do besides."""

    window: AccumulationWindow | None = None
    """Several calls make one update."""
    processes: Processes | None = None
    """Gradients are averaged over these."""
    average: WeightAverage | None = None
    """The average of the weights."""

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of calls: whether they update the weights."""
        return (True,) if self.window is None else self.window.kinds


class TrainingStep:
    """Forward and loss, backward, check, update, scale."""

    def __init__(
        self,
        compute: Compute,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        precision: Precision,
        rules: CastRules,
        max_norm: float | None,
        parts: StepParts | None = None,
    ) -> None:
        self.compute, self.modules, self.optimizer = compute, modules, optimizer
        self.precision, self.rules, self.max_norm = precision, rules, max_norm
        self.parts = parts or StepParts()
        self.grad_norm: Tensor | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler; None if the loss is not scaled."""
        return self.precision.scaler

    def run(self, batch: Sequence[Tensor], updates: bool = True) -> tuple[Tensor, ...]:
        """Train one step; return its loss and the other results of `compute`.

        Args:
            batch: Inputs of the model, then the target.
            updates: False only adds to the gradients.
        """
        results = self._forward(batch)
        loss, window = results[0], self.parts.window
        try:
            self.precision.backward(loss if window is None else loss / window.size)
            if updates:
                self._update()
        except BaseException:
            if window is None:
                self.optimizer.zero_grad(set_to_none=True)  # the next step must not add to these gradients
            raise
        return tuple(result.detach().clone() for result in results)

    def differentiate(self, batch: Sequence[Tensor]) -> None:
        """Run forward and backward pass only, without a loss scale."""
        self._forward(batch)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the loss, in float32 or wider, and the other results of `compute`."""
        with casting_region(self.rules):
            try:
                results = self.compute(*batch)
            except (RuntimeError, TypeError, ValueError, MezzoError) as error:
                self._explain_missing_policy(error)
                raise
        _check_results(results)
        loss = results[0].float() if results[0].dtype in HALF_DTYPES else results[0]
        return loss, *results[1:]

    def _update(self) -> None:
        window, processes, average = self.parts.window, self.parts.processes, self.parts.average
        if processes is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            processes.average([param.grad for param in params if param.grad is not None])
        self.grad_norm = self.precision.step(self.optimizer, max_norm=self.max_norm)
        if processes is not None:
            processes.share_buffers()
        if average is not None:
            average.update()
        if window is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            window.clear()

    def _explain_missing_policy(self, error: Exception) -> None:
        """Raise ValueError if half weights met float32 inputs because the step has no policy.

        If the error does not name both dtypes, only add a note to it.
        """
        reason = " ".join(str(error).split())
        if self.rules.is_on or current_policy() is not None or not _TYPES_DIFFER.search(reason):
            return
        half = next((p.dtype for p in self._params() if p.dtype in HALF_DTYPES), None)
        if half is None or _NAMES_OTHER.search(reason):
            return
        cure = f"the model has {dtype_name(half)} weights; give policy='O2', or the level that decorate was called with"
        if _NAMES_HALF.search(reason) and _NAMES_FLOAT32.search(reason):
            raise ValueError(f"policy is missing: {cure} ({reason[:200]})") from error
        error.add_note(f"the step has no policy, and {cure}")

    def _params(self) -> Iterable[nn.Parameter]:
        return (param for module in self.modules for param in module.parameters())

    def module_watch(self) -> Callable[[], bool]:
        """Return a function that checks whether the modules are unchanged.

        It compares parts, modes, `requires_grad` and addresses of buffers. It runs before every
        replay, while the device may be idle. So it compares flat lists and does not walk the
        modules (MobileNetV3-small: 70 us instead of 500 us).
        """
        parts = [part for module in self.modules for part in module.modules()]
        attributes = [vars(part) for part in parts]
        held = [of[kind] for of in attributes for kind in ("_modules", "_parameters", "_buffers")]
        params = list(self._params())
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        if self.parts.average is not None:
            buffers += self.parts.average.tensors

        def state() -> tuple[list[int], list[bool], list[bool], list[int]]:
            return (
                [id(value) for values in held for value in values.values()],
                [of["training"] for of in attributes],
                [param.requires_grad for param in params],
                [buffer.data_ptr() for buffer in buffers],
            )

        now = state()
        return lambda: state() == now

    @contextmanager
    def gradients_put_aside(self) -> Iterator[None]:
        """Inside, gradients are None.

        Afterwards, the gradients of parameters that the optimizer does not train are restored.
        """
        steps = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        others = [(p, p.grad) for p in self._params() if id(p) not in steps]
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            for param, grad in others:
                param.grad = grad

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, steps only warm up.

        Afterwards weights, state, buffers and scales are restored.
        """
        values = [(tensor, tensor.clone()) for tensor in self._weights_and_buffers()]
        states = {param: _clones(state) for param, state in self.optimizer.state.items()}
        histories = {history: history.copy() for history in histories_of(self._weights()) if not history.is_empty}
        with ExitStack() as parts:
            if self.scaler is not None:
                parts.enter_context(self.scaler.captured.rehearsal())
            if self.parts.processes is not None:
                parts.enter_context(self.parts.processes.paused())
            try:
                yield
            finally:
                for tensor, value in values:
                    tensor.copy_(value)
                # By key: a step converts loaded state to its own dtype, layout and device. State
                # that did not exist becomes zero, as before a first step.
                for param, state in self.optimizer.state.items():
                    before = states.get(param, {})
                    for key, value in state.items():
                        if isinstance(value, Tensor):
                            _set(value.data, before.get(key))
                for history in histories_of(self._weights()):
                    if not history.is_empty:
                        history.restore(histories.get(history))

    def _weights(self) -> list[Tensor]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in (*self._params(), *params)}.values())

    def _weights_and_buffers(self) -> list[Tensor]:
        weights = self._weights()
        masters = [kept for p in weights if (kept := stored_master(p)) is not None]
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        # `.data`: masters must not treat the restored values as edits by the user.
        return [tensor.data for tensor in (*weights, *masters, *buffers) if not _is_expanded(tensor)]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are one in memory: torch does not write into such a tensor, so no step changes it."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _check_results(results: Sequence[Any]) -> None:
    """Raise TypeError or ValueError unless the results are tensors and the loss is one number."""
    if not results:
        raise ValueError("the loss function returned an empty tuple: it must return tensors, the loss first")
    for result in results:
        if not isinstance(result, Tensor):
            raise TypeError(
                f"the loss function returned a {type(result).__name__}: it must return tensors, the loss first"
            )
    if results[0].numel() != 1:
        raise ValueError(f"the loss has shape {list(results[0].shape)}: it must be one number; call .mean() on it")
    if not results[0].requires_grad:
        raise ValueError(
            "the loss has no gradient: no weight that it depends on is trained, or it was computed inside of torch.no_grad(), "
            "inference_mode() or detach(); set requires_grad on a weight, or compute the loss outside of these"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless `optimizer` is a torch.optim.Optimizer, ValueError if it needs a closure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: the step of {type(optimizer).__name__} needs a closure, which it calls several times; a compiled "
            "or captured step runs forward and backward once, so use another optimizer or a loop of your own"
        )


def _clones(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _set(tensor: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor.copy_(value)
    else:
        tensor.fill_(0 if value is None else value)


def device_of(modules: Sequence[nn.Module], batch: Sequence[Any], smallest: int = 2) -> torch.device:
    """Return the device that parameters and batch share.

    Raises:
        ValueError: They are on several devices, or the batch is not a sequence of tensors.
    """
    if len(batch) < smallest or not all(isinstance(tensor, Tensor) for tensor in batch):
        came = ", ".join(type(value).__name__ for value in batch) or "nothing"
        raise ValueError(
            f"batch: must be tensors, inputs of the model first, the target last, at least {smallest}; got {came}"
        )
    devices = {p.device for module in modules for p in module.parameters()} | {tensor.device for tensor in batch}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model and batch must be on one device; they are on {names or 'none'}")
    return devices.pop()


def describe(tensor: Any) -> str:
    """Return dtype and shape of a tensor, such as `float32[2, 3]`."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
