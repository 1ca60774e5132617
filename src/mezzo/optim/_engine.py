"""The step of any torch optimizer on float32 masters: check, update, half copy."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mezzo._torch.dynamo import hide_from_dynamo
from mezzo._torch.modes import no_torch_function
from mezzo._torch.optimizers import (
    STATE_DICT_HOOKS,
    STEP_WAS_CALLED,
    SUPPORTS_SCALING,
    call_between_step_hooks,
    is_wrapped_by_scheduler,
    mark_as_wrapped,
)
from mezzo._torch.sharding import is_of_fsdp1
from mezzo._torch.step_tier import uses_triton
from mezzo.optim import _fused
from mezzo.optim._check import Verdict, check
from mezzo.optim._grads import Slot, factor_of, gather, inverse_of
from mezzo.optim._half_state import convert_state, refuse_half_state
from mezzo.optim._masters import attach_master, has_several_ranks, is_half, stored_master
from mezzo.optim._outside import forget_casts, keep_autocast, outside_autocast
from mezzo.optim._shards import is_dtensor
from mezzo.optim._swap import masters_as_params, placeholder_masters, step_on_masters, step_with_closure
from mezzo.optim._unscale import unscale_

if TYPE_CHECKING:
    from mezzo.optim._triton_step import StepPlan, TritonStep

_HOME = "_mezzo_engine"
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


@dataclass(slots=True)
class StepRequest:
    """What a loss scaler asks of one step.

    `plain_request()` is that of a user's own `optimizer.step()`.
    """

    scale: Tensor | None = None
    """Loss scale of the gradients; None if they are not scaled."""
    verdict: Verdict | None = None
    """Result of the check if it ran already; otherwise the step checks and stores it here."""
    clip_coef: Tensor | None = None
    """The unscaled gradients are multiplied by it."""
    checks: bool = True
    """Whether the step checks the gradients if there is no verdict."""
    is_known_good: bool = False
    """Whether the host has read that the verdict is good."""
    has_rewritten: bool = False
    """Whether the step unscaled and clipped the gradients in place, even if it failed later."""


def plain_request() -> StepRequest:
    """Return the request of `optimizer.step()` without a scaler: true gradients, no check."""
    return StepRequest(checks=False)


class _PendingClip:
    """A clip coefficient for the next step with the gradients that it was computed from."""

    def __init__(self, coef: Tensor, grads: list[Tensor]) -> None:
        self.coef = coef
        self._grads = [(weakref.ref(grad), grad._version) for grad in grads]

    def for_grads(self, grads: list[Tensor]) -> Tensor | None:
        """Return the coefficient if these are its gradients; None if all are other ones.

        Raises:
            RuntimeError: Only some of them are, or they were changed since.
        """
        known = [(reference(), version) for reference, version in self._grads]
        if [(id(grad), grad._version) for grad in grads] == [(id(grad), version) for grad, version in known]:
            return self.coef
        if {id(grad) for grad in grads}.isdisjoint(id(grad) for grad, _ in known):
            return None  # the clipped gradients were dropped
        if grads:
            raise RuntimeError(
                "gradients changed between clip_grad_norm_() and step(): clip after the last backward of the step"
            )
        return None


class StepEngine:
    """Checks and updates the parameters of one optimizer; created by `engine_of` or `attach`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.is_lookalike = not isinstance(optimizer, Optimizer) or STATE_DICT_HOOKS not in optimizer.__dict__
        """Whether the object only has the methods of an optimizer, as apex's LARC.

        Also a wrapper of torch's class that does not call its `__init__`, as accelerate's.
        """
        self.attached = False
        self.masters_for_new = True
        self.new_are_compact = False
        self.state_dtype = torch.float32
        """Of the optimizer's state; bfloat16 state is rounded stochastically."""
        self._foreign_step: Callable[..., Any] | None = None
        self._request_behind_wrapper: StepRequest | None = None
        self._clip: _PendingClip | None = None
        self._triton: TritonStep | None = None
        self._one: Tensor | None = None
        self._may_be_of_fsdp1 = True
        self.last_plan: StepPlan | None = None
        """The plan of the last step; None unless Triton took it."""

    @property
    def device(self) -> torch.device:
        """Device of verdicts.

        That of the first gradient, or of the first parameter if there is none.
        """
        grad = self.first_grad()
        if grad is not None:
            return grad.device
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        return next((p.device for p in params), torch.device("cpu"))

    def first_grad(self) -> Tensor | None:
        """Return the first gradient; None if no parameter has one."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                grad: Tensor | None = param.grad
                if grad is not None:
                    return grad
        return None

    def refuse_fsdp1(self) -> None:
        """Raise RuntimeError if FSDP1 shards the parameters.

        Each rank would decide by its own shard.

        Checks the parameters only once.
        """
        if not self._may_be_of_fsdp1:
            return
        if has_several_ranks() and any(is_of_fsdp1(p) for g in self.optimizer.param_groups for p in g["params"]):
            raise RuntimeError(
                "this optimizer updates parameters of FullyShardedDataParallel (FSDP1), where each rank sees a part of the "
                "gradients only: ranks would skip different steps and clip by different norms; shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2), which mezzo supports"
            )
        self._may_be_of_fsdp1 = False

    def has_masters(self) -> bool:
        """Whether any parameter has a float32 master."""
        return any(stored_master(p) is not None for group in self.optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def check(self, scale: Tensor | None = None, max_norm: float | None = None) -> Verdict:
        """Read all gradients once; return a verdict on the device, without host synchronisation."""
        with outside_autocast():
            return self._check(self._prepare_plan(), scale, max_norm)

    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        """Clip in the next step of an attached optimizer, without a loss scale.

        Return the norm before.
        """
        verdict = self.check(None, max_norm)
        assert verdict.clip_coef is not None
        assert verdict.total_norm is not None
        self._clip = _PendingClip(verdict.clip_coef, self._grads())
        return verdict.total_norm

    def _grads(self) -> list[Tensor]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.grad for p in params if p.grad is not None]

    def _take_clip(self) -> Tensor | None:
        clip, self._clip = self._clip, None
        return None if clip is None else clip.for_grads(self._grads())

    def _prepare_plan(self) -> StepPlan | None:
        """Return a plan that is ready for this step; None if Triton cannot take it."""
        if self._foreign_step is not None or not _fused.covers_class(self.optimizer) or not uses_triton(self.device):
            return None
        if self._triton is None:
            from mezzo.optim._triton_step import TritonStep  # Triton is slow to import

            self._triton = TritonStep(self.optimizer, self.state_dtype)
        return self._triton.prepare_plan()

    def can_be_captured(self) -> bool:
        """Whether steps can be part of a CUDA graph.

        Triton takes them, and the first is like all others.
        """
        if self._foreign_step is not None or _foreign_step(self.optimizer) is not None:
            return False
        covered = _fused.covers_class(self.optimizer) and uses_triton(self.device)
        return covered and all(
            _fused.covers_options(group) and _fused.knows_first_steps(self.optimizer, group, group["params"])
            for group in self.optimizer.param_groups
        )

    def _check(self, plan: StepPlan | None, scale: Tensor | None, max_norm: float | None) -> Verdict:
        if plan is not None:
            return plan.check(scale, max_norm)
        slots = [slot for group in gather(self.optimizer) for slot in group]
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return check(slots, count, self.device, scale, max_norm)

    def _apply(self, verdict: Verdict | None, factor: Tensor | None, args: _Args, kwargs: _Kwargs) -> Any:
        """Update the parameters unless the verdict is an overflow.

        Return what the optimizer returns.

        SGD, Adam and AdamW need no host synchronisation. Other optimizers need one host read of
        `found_inf` on CUDA, unless they take it themselves (`fused=True`).
        """
        groups = gather(self.optimizer)
        if self._foreign_step is None and not args and not kwargs and _fused.covers(self.optimizer, groups):
            return _fused.apply(self.optimizer, groups, verdict, factor, self.state_dtype)
        if self.state_dtype is not torch.float32:
            self.refuse_half_state()
            raise RuntimeError(
                "optimizer_state='bfloat16': a step takes dense gradients and no arguments besides a closure; use float32 "
                "state"
            )
        slots = [s for group in groups for s in group]
        own_step = functools.partial(self._own_step, *args, **kwargs)
        if verdict is not None and self._takes_found_inf():
            return self._step_with_found_inf(own_step, slots, verdict, factor)
        # The one host read of the generic path
        if verdict is not None and verdict.found_inf.item():
            return None
        return step_on_masters(self.optimizer, own_step, slots, factor)

    def _takes_found_inf(self) -> bool:
        # Stock fused SGD skips without writing its first momentum buffer, and then uses it.
        return getattr(self.optimizer, SUPPORTS_SCALING, False) and not isinstance(self.optimizer, SGD)

    def _step_with_found_inf(
        self, own_step: Callable[..., Any], slots: list[Slot], verdict: Verdict, factor: Tensor | None
    ) -> Any:
        """Let the optimizer skip by itself.

        Set torch's two attributes, with unscaled gradients and a scale of 1.
        """
        optimizer: Any = self.optimizer
        found_inf = verdict.found_inf
        if self._one is None or self._one.device != found_inf.device:
            self._one = torch.ones_like(found_inf)
        optimizer.grad_scale, optimizer.found_inf = self._one, found_inf
        try:
            return step_on_masters(optimizer, own_step, slots, factor)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _own_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's own rule without its hooks, which `step` has called."""
        if self._foreign_step is not None:
            return self._foreign_step(*args, **kwargs)
        step = type(self.optimizer).step
        if getattr(step, "hooked", False):
            step = getattr(step, "__wrapped__", step)
        return step(self.optimizer, *args, **kwargs)

    def step(self, request: StepRequest, *args: Any, **kwargs: Any) -> Any:
        """Take one step: torch's step hooks run, and between them the update.

        `optimizer.step()` of an attached optimizer ends here, and so does `GradScaler.step`. If the
        host learns of an overflow without waiting for the device, the step ends before its hooks,
        and returns None.

        Args:
            request: What to check, unscale and clip.
            args: Passed on to the optimizer's own rule.
            kwargs: The same.
        """
        optimizer: Any = self.optimizer
        if not self.attached:
            self._foreign_step = None if self.is_lookalike else _foreign_step(optimizer)
        if self._ends_early(request):
            return None
        if self.is_lookalike:
            return self._step_lookalike(request, args, kwargs)
        if self._foreign_step is not None:  # the step of the instance runs the hooks
            return self._update(request, args, kwargs)
        return call_between_step_hooks(optimizer, self._update, request, args, kwargs)

    def step_through_wrapper(self, request: StepRequest, wrapper: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take one step by `step`.

        If somebody wrapped `optimizer.step` after `attach`, or gave a wrapper of the optimizer, let
        the wrapper call it.

        accelerate counts calls by such a wrapper. A wrapper takes the arguments of `optimizer.step`
        and no others, so the request waits in the engine until the wrapper calls the step that
        `attach` put on the optimizer. A wrapper that accumulates gradients may not call it: then
        the request has no verdict.

        Args:
            request: What to check, unscale and clip.
            wrapper: What the user stepped: the optimizer, or a wrapper that `unwrap_optimizer` knows.
            args: Passed on to the step.
            kwargs: The same.
        """
        if wrapper is not self.optimizer:
            return self._step_behind(request, wrapper.step, args, kwargs)
        step: Any = self.optimizer.__dict__.get("step")
        if not self.attached or getattr(step, "__func__", None) is _attached_step:
            return self.step(request, *args, **kwargs)
        if self._ends_early(request):
            return None
        return self._step_behind(request, self.optimizer.step, args, kwargs)

    def _step_behind(self, request: StepRequest, step: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
        """Call a step that ends in the step of this attached optimizer, which finds the request."""
        self._request_behind_wrapper = request
        try:
            return step(*args, **kwargs)
        finally:
            self._request_behind_wrapper = None

    def _ends_early(self, request: StepRequest) -> bool:
        """Whether the host knows, without an added wait, that the gradients overflowed."""
        if not request.checks or request.is_known_good:
            return False
        return self._knows_skips_on_host() and self._skips(request)

    def _knows_skips_on_host(self) -> bool:
        """Whether reading the verdict before the step adds no wait for the device."""
        if self.last_plan is not None:  # Triton's steps, which wait for nothing
            return False
        is_covered = self._foreign_step is None and _fused.covers_class(self.optimizer)
        if is_covered and all([_fused.covers_options(group) for group in self.optimizer.param_groups]):
            device = self.device
            return device.type == "cpu" and not uses_triton(device)
        return self.is_lookalike or not self._takes_found_inf()  # the generic path reads it anyway

    @hide_from_dynamo("a scaler's step reads on the host: call it outside the compiled function")
    def _skips(self, request: StepRequest) -> bool:
        """Check if there is no verdict yet; return whether it is an overflow. Waits for CUDA."""
        if request.verdict is None:
            request.verdict = self.check(request.scale)
        request.is_known_good = not request.verdict.found_inf.item()
        return not request.is_known_good

    def _step_lookalike(self, request: StepRequest, args: _Args, kwargs: _Kwargs) -> Any:
        """Unscale the gradients in place and call the object's own step."""
        with outside_autocast():
            factor = factor_of(request.scale, request.clip_coef)
            if factor is not None:
                with torch.no_grad():
                    unscale_([slot for slots in gather(self.optimizer) for slot in slots], factor)
                request.has_rewritten = True
            result = self.optimizer.step(*args, **kwargs)
        forget_casts()
        return result

    @functools.cached_property
    def needs_closure(self) -> bool:
        """Whether `optimizer.step` requires a closure, as that of LBFGS."""
        parameter = _step_parameters(self.optimizer).get("closure")
        return parameter is not None and parameter.default is inspect.Parameter.empty

    @functools.cached_property
    def takes_grad_scaler(self) -> bool:
        """Cached result of the function of this name."""
        return takes_grad_scaler(self.optimizer)

    @torch.no_grad()
    @hide_from_dynamo("a decorated optimizer's step runs fused kernels already: call it outside the compiled function")
    def _update(self, request: StepRequest, args: _Args, kwargs: _Kwargs) -> Any:
        """Take the step between the hooks: check if requested, then update.

        With a closure, evaluate it first.
        """
        optimizer: Any = self.optimizer
        setattr(optimizer, STEP_WAS_CALLED, True)
        if args or kwargs:
            closure, args, kwargs = split_closure(args, kwargs)
            if closure is not None:
                self._clip = None  # the closure brings gradients of its own
                return self._update_by_closure(closure, args, kwargs)
        with outside_autocast():
            result = self._update_by_grads(request, args, kwargs)
        forget_casts()
        return result

    def _update_by_grads(self, request: StepRequest, args: _Args, kwargs: _Kwargs) -> Any:
        # A plan reads a thousand attributes, and a function mode (a recording) would see each
        # access.
        with no_torch_function():
            plan = None if args or kwargs else self._prepare_plan()
        if self._clip is not None and not request.checks and request.clip_coef is None:
            request.clip_coef = self._take_clip()
        if request.verdict is None and request.checks:
            request.verdict = self._check(plan, request.scale, None)
        verdict = None if request.is_known_good else request.verdict
        self.last_plan = plan
        if plan is not None:
            with no_torch_function():
                plan.update(None if verdict is None else verdict.found_inf, request.scale, request.clip_coef)
            return None
        return self._apply(verdict, factor_of(request.scale, request.clip_coef), args, kwargs)

    def _update_by_closure(self, closure: Callable[[], Any], args: _Args, kwargs: _Kwargs) -> Any:
        if args or kwargs or self._foreign_step is not None or not _fused.covers_class(self.optimizer):

            def own_step(evaluate: Callable[[], Any]) -> Any:
                return self._own_step(evaluate, *args, **kwargs)

            kept = keep_autocast(closure)
            with outside_autocast():
                result = step_with_closure(self.optimizer, own_step, kept)
            forget_casts()
            return result
        with torch.enable_grad():
            loss = closure()
        self._update(plain_request(), (), {})
        return loss

    @torch.no_grad()
    def unscale_grads_(self, scale: Tensor) -> None:
        """Unscale every gradient in place; half ones become float32 where this torch allows it."""
        with outside_autocast():
            unscale_([slot for slots in gather(self.optimizer) for slot in slots], inverse_of(scale))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as the stock optimizer does; the state of half parameters stays float32."""
        with masters_as_params(self.optimizer, placeholder_masters(self.optimizer)):
            type(self.optimizer).load_state_dict(self.optimizer, state_dict)
        if self.state_dtype is not torch.float32:  # torch widened what was saved as bfloat16: no bit is lost
            convert_state(self.optimizer, self.state_dtype)

    def refuse_half_state(self) -> None:
        """Raise ValueError if the optimizer cannot have bfloat16 state."""
        own_step = self._foreign_step if self.attached else _foreign_step(self.optimizer)
        refuse_half_state(self.optimizer, has_own_step=own_step is not None)

    def set_state_dtype(self, dtype: torch.dtype) -> None:
        """Keep the optimizer's state in float32 or bfloat16 from now on."""
        if dtype is self.state_dtype:
            return
        if dtype is not torch.float32:
            self.refuse_half_state()
        self.state_dtype, self._triton = dtype, None
        convert_state(self.optimizer, dtype)

    def set_masters_for_new(self, are_wanted: bool | None, compact: bool | None) -> None:
        """Choose the masters of parameters that are added later; None changes nothing."""
        self.masters_for_new = self.masters_for_new if are_wanted is None else are_wanted
        self.new_are_compact = self.new_are_compact if compact is None else compact

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add as the stock optimizer does; half parameters without a master get one."""
        type(self.optimizer).add_param_group(self.optimizer, param_group)
        if not self.masters_for_new:
            return
        for param in self.optimizer.param_groups[-1]["params"]:
            if is_half(param) and stored_master(param) is None:
                attach_master(param, compact=self.new_are_compact and not is_dtensor(param))


def _step_parameters(optimizer: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the `step` of an optimizer or a class.

    None if it is written in C.
    """
    # of the class: `attach` and LR schedulers put another step on the instance
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    try:
        return inspect.signature(kind.step if hasattr(kind, "step") else optimizer.step).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def takes_grad_scaler(optimizer: Any) -> bool:
    """Whether the step of an optimizer has a `grad_scaler` argument.

    Torch's older way to let it unscale.
    """
    return "grad_scaler" in _step_parameters(optimizer)


def split_closure(args: _Args, kwargs: _Kwargs) -> tuple[Callable[[], Any] | None, _Args, _Kwargs]:
    """Return the closure among the arguments of a step, and the other arguments.

    None is not a closure; neither is a module, which some steps take.
    """
    is_closure = bool(args) and callable(args[0]) and not isinstance(args[0], nn.Module)
    if is_closure or (len(args) == 1 and args[0] is None):
        return args[0], args[1:], kwargs
    if "closure" in kwargs:
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return kwargs["closure"], args, others
    return None, args, kwargs


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper such as accelerate's; any other object as it is.

    A wrapper is of torch's class but did not call its `__init__`, and its `optimizer` is a torch
    optimizer. It has neither hooks nor state of its own, so the inner one must be attached.
    """
    while isinstance(optimizer, Optimizer) and STATE_DICT_HOOKS not in optimizer.__dict__:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def find_engine(optimizer: Optimizer) -> StepEngine | None:
    """Return the engine of an optimizer; None if it has none yet."""
    engine: StepEngine | None = optimizer.__dict__.get(_HOME)
    return engine


def engine_of(optimizer: Optimizer) -> StepEngine:
    """Return the engine of an optimizer, created at the first call.

    The optimizer's methods do not change.

    Raises:
        TypeError: The object cannot carry the engine.
    """
    try:
        engine = find_engine(optimizer)
    except AttributeError:
        raise _cannot_carry(optimizer) from None
    if engine is None:
        try:
            hash(weakref.ref(optimizer))
        except TypeError:
            raise _cannot_carry(optimizer) from None
        engine = StepEngine(optimizer)
        optimizer.__dict__[_HOME] = engine
        if not engine.is_lookalike:
            optimizer.register_state_dict_post_hook(_steps_to_host)
    return engine


def _cannot_carry(optimizer: Any) -> TypeError:
    return TypeError(
        f"{type(optimizer).__name__} cannot be used as an optimizer: it must take new attributes, be hashable and allow weak "
        "references; wrap the optimizer in an ordinary class without __slots__"
    )


def refuse_lookalike(optimizer: Optimizer) -> None:
    """Raise TypeError if an object only has the methods of an optimizer, as Lookahead of timm: masters need more."""
    if engine_of(optimizer).is_lookalike:
        raise TypeError(
            f"{type(optimizer).__name__} did not call torch.optim.Optimizer.__init__, so its step() cannot update masters; "
            "prepare (decorate) the optimizer inside of it first, then wrap that one"
        )


def attach(
    optimizer: Optimizer,
    *,
    masters_for_new: bool | None = None,
    compact: bool | None = None,
    state_dtype: torch.dtype | None = None,
) -> StepEngine:
    """Replace `optimizer.step` by mezzo's.

    Object and class stay. A second call only changes the options.

    Args:
        optimizer: Any torch optimizer; parameters with masters are updated through them.
        masters_for_new: Half parameters of later `add_param_group` calls get masters; None: as it is, at first True.
        compact: Those masters are compact; None: as it is, at first False.
        state_dtype: float32 or bfloat16, of the optimizer's state; None: as it is, at first float32.

    Raises:
        TypeError: The object only has the methods of an optimizer, as Lookahead of timm and others.
        ValueError: The optimizer cannot have bfloat16 state.
    """
    engine = engine_of(optimizer)
    refuse_lookalike(optimizer)
    if engine.attached:
        if state_dtype is not None:
            engine.set_state_dtype(state_dtype)
        engine.set_masters_for_new(masters_for_new, compact)
        return engine
    engine.refuse_fsdp1()
    if state_dtype not in (None, torch.float32):
        engine.refuse_half_state()
    engine.set_masters_for_new(masters_for_new, compact)
    engine._foreign_step = _foreign_step(optimizer)
    engine.attached = True
    for group in optimizer.param_groups:
        for param in group["params"]:
            # A move to another device synchronises: do it here, not in the first step
            stored_master(param)
    _widen_state(optimizer)
    if state_dtype is not None:
        engine.set_state_dtype(state_dtype)
    # This replaces the wrapper of an LR scheduler; our step sets the flag that the wrapper sets.
    optimizer.__dict__["step"] = types.MethodType(_attached_step, optimizer)
    optimizer.__dict__["load_state_dict"] = types.MethodType(_load_state_dict, optimizer)
    optimizer.__dict__["add_param_group"] = types.MethodType(_add_param_group, optimizer)
    if optimizer.zero_grad == types.MethodType(Optimizer.zero_grad, optimizer):  # keep a user's own
        optimizer.__dict__["zero_grad"] = types.MethodType(_zero_grad, optimizer)
    return engine


def _foreign_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return a step that the user put on the instance.

    None for the class's own or an LR scheduler's wrapper.
    """
    step: Callable[..., Any] | None = optimizer.__dict__.get("step")
    return None if step is None or is_wrapped_by_scheduler(step) else step


def _attached_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Take a step on the float32 masters; the `step` of an attached optimizer."""
    engine = engine_of(optimizer)
    request, engine._request_behind_wrapper = engine._request_behind_wrapper, None
    return engine.step(request or plain_request(), *args, **kwargs)


mark_as_wrapped(_attached_step)


def _load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    engine_of(optimizer).load_state_dict(state_dict)


def _add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    engine_of(optimizer).add_param_group(param_group)


@hide_from_dynamo("torch's own zero_grad is not traced either: call it outside the compiled function")
def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Do as the stock optimizer does, but hide each gradient from function modes (recordings)."""
    # zeroing launches kernels, which a recording should see
    with no_torch_function() if set_to_none else nullcontext():
        type(optimizer).zero_grad(optimizer, set_to_none)


def _widen_state(optimizer: Optimizer) -> None:
    """Convert half state of parameters that have masters to float32."""
    for param, state in optimizer.state.items():
        if not isinstance(state, dict) or not isinstance(param, Tensor) or stored_master(param) is None:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and is_half(value):
                state[key] = value.float()


def _steps_to_host(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Move step counts to the host, unless the optimizer is fused or capturable."""
    on_device = {i for g in state_dict["param_groups"] if g.get("fused") or g.get("capturable") for i in g["params"]}
    state = {k: v if k in on_device else _step_to_host(v) for k, v in state_dict["state"].items()}
    return {**state_dict, "state": state}


def _step_to_host(state: Any) -> Any:
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, Tensor) or step.device.type == "cpu":
        return state
    return {**state, "step": step.cpu()}
