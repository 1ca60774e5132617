"""Loss scaling with its state on the device: neither a step nor an update waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.optimizers import SUPPORTS_SCALING
from mezzo.amp._dialects import check_device_type, takes_torch_arguments
from mezzo.amp._scaler_captured import CapturedScaling
from mezzo.amp._scaler_engines import checked_engine, multiply_scale, step_without_scale
from mezzo.amp._scaler_norms import NormGuard
from mezzo.amp._scaler_outcome import LossScaleFloorError, OutcomeHandle, OutcomeLog
from mezzo.amp._scaler_pairs import ParamsAndGrads
from mezzo.amp._scaler_progress import OptimizerProgress, Stage, merge_verdicts, verdict_of_all
from mezzo.amp._scaler_rule import ScaleRule, check_enable, check_flag, check_rule, check_scale
from mezzo.amp._scaler_saving import pack_state, plain_number, unpack_state
from mezzo.amp._scaler_settings import ScalerSettings
from mezzo.amp._scaler_state import ScaleState
from mezzo.amp._scaler_watch import ScaleWatch
from mezzo.amp._steps import warn_if_masters_are_missing
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import StepEngine, StepRequest, Verdict, attach, outside_autocast, remember_names, split_closure

__all__ = ["GradScaler", "LossScaleFloorError"]

T = TypeVar("T")


class GradScaler(ScalerSettings):
    """Scales the loss so that half gradients do not vanish; skips steps that overflow.

    Per optimizer and step: `scale(loss).backward()`, then `step(optimizer)`, then `update()` once
    for all of them. An optimizer skips its step if its own gradients overflow. The scale shrinks if
    those of any optimizer do.

    Args:
        enable: False: `scale` returns its argument, and `step` and `minimize` only call the
            optimizer.
        init_loss_scaling: The first scale.
        incr_ratio: Growth factor, above 1.
        decr_ratio: Shrink factor, between 0 and 1.
        incr_every_n_steps: Good steps in a row before the scale grows; 0: it never grows.
        decr_every_n_nan_or_inf: Bad steps in a row before the scale shrinks; 0: it never shrinks.
        use_dynamic_loss_scaling: False: the scale never changes.
        min_loss_scaling: The scale never shrinks below this; 0: no limit. `init_loss_scaling` may
            be smaller.
        max_skips_at_floor: So many bad steps in a row with the scale at its minimum raise
            `LossScaleFloorError`; None: never.
        device: `cuda` or `cpu`, as torch's scaler takes it; without effect: the scaler works where
            the losses are. A device may also come first; then the positional arguments after it are
            torch's: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.

    torch's names work as keywords too: `enabled`, `init_scale`, `growth_factor`, `backoff_factor` and
    `growth_interval` mean `enable`, `init_loss_scaling`, `incr_ratio`, `decr_ratio` and
    `incr_every_n_steps`. Settings that are left out have the values above, not torch's.

    >>> scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> _ = scaler.minimize(optimizer)
    >>> weight.item(), scaler.get_scale(), scaler.skipped_steps
    (1.0, 2.0, 1)
    """

    @overload
    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        min_loss_scaling: float = 1.0,
        max_skips_at_floor: int | None = 25,
        *,
        device: str | torch.device | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        device: str | torch.device = ...,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        enabled: bool = True,
        *,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        min_loss_scaling: float = 1.0,
        max_skips_at_floor: int | None = 25,
    ) -> None: ...
    @takes_torch_arguments(
        "device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled",
        init_scale="init_loss_scaling", growth_factor="incr_ratio", backoff_factor="decr_ratio",
        growth_interval="incr_every_n_steps", enabled="enable",
    )  # fmt: skip
    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        min_loss_scaling: float = 1.0,
        max_skips_at_floor: int | None = 25,
        *,
        device: str | torch.device | None = None,
    ) -> None:
        self._enable = check_enable(enable)
        if device is not None:
            check_device_type("GradScaler", device)
        self._dynamic = check_flag(
            "use_dynamic_loss_scaling", plain_number("use_dynamic_loss_scaling", use_dynamic_loss_scaling)
        )
        self._rule = check_rule(
            ScaleRule(
                incr_ratio=incr_ratio,
                decr_ratio=decr_ratio,
                incr_every_n_steps=incr_every_n_steps,
                decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
                min_loss_scaling=min_loss_scaling,
                max_skips_at_floor=max_skips_at_floor,
            )
        )
        self._init_scale = check_scale("init_loss_scaling", init_loss_scaling)
        self._state = ScaleState(self._init_scale)
        self._progress: weakref.WeakKeyDictionary[Optimizer, OptimizerProgress] = weakref.WeakKeyDictionary()
        self._stepped: list[tuple[weakref.ref[Optimizer], Verdict]] = []
        self._has_idle_step = False
        self._log = OutcomeLog()
        self._norms: list[NormGuard] = []
        if self._enable:
            self._watch = ScaleWatch()

    def __repr__(self) -> str:
        """Return settings and state without waiting for the device.

        The scale is that of the last known update.
        """
        if not self._enable:
            return "GradScaler(enable=False)"
        settings = {"init_loss_scaling": self._init_scale, "use_dynamic_loss_scaling": self._dynamic}
        settings |= {name: getattr(self._rule, name) for name in self._rule.field_names()}
        scale = self._state.known_scale()
        if scale is None:
            scale = self._log.last_scale
        state = {"scale": "on the device" if scale is None else scale, "skipped_steps": self._log.skipped}
        shown = [", ".join(f"{name}={value}" for name, value in part.items()) for part in (settings, state)]
        return f"GradScaler({'; '.join(shown)})"

    # The steps of training

    def scale(self, outputs: T) -> T:
        """Return a tensor, or an iterable of tensors, times the scale; half tensors become float32.

        Lists and tuples keep their type; another iterable gives an iterator. Warns once of a half
        loss.
        """
        if not self._enable:
            return outputs
        if isinstance(outputs, Tensor):
            return cast(T, self._scale_tensor(outputs))
        if isinstance(outputs, list | tuple):
            return cast(T, type(outputs)([self.scale(item) for item in outputs]))
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | Mapping):
            return cast(T, map(self.scale, outputs))
        raise TypeError(f"scale() takes a tensor or an iterable of tensors; got {type(outputs).__name__}")

    def _scale_tensor(self, tensor: Tensor) -> Tensor:
        self._state.place(tensor.device)
        with outside_autocast(tensor.device.type):
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            scaled = wide * self._state.scale_on(tensor.device)
        if scaled.requires_grad:
            self._watch.note_scaled(scaled)
            if wide is not tensor and tensor.dtype in HALF_DTYPES and tensor.numel() == 1:
                self._watch.warn_once(
                    "half loss",
                    f"scale() got a {dtype_name(tensor.dtype)} loss: it was computed in half precision, perhaps outside of "
                    "auto_cast, and may have lost digits or overflowed; compute the loss inside auto_cast (or "
                    "precision.autocast(), if you use mezzo.Precision), where losses are float32, or from outputs.float()",
                )
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale in place, to inspect or change them.

        They become float32. `step` works without this call, and then leaves the gradients as they
        are.
        """
        if not self._enable:
            return
        engine = checked_engine(optimizer)
        progress = self._progress_of(engine)
        if progress.stage is Stage.UNSCALED:
            raise RuntimeError("unscale_() was already called on this optimizer since the last update()")
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is called after step(): call update() before the next step begins")
        scale = self._scale_for(engine, "unscale_")
        self._watch.note_optimizer(optimizer)
        progress.verdict = merge_verdicts(progress.verdict, engine.check(scale))
        engine.unscale_grads_(scale)
        progress.stage = Stage.UNSCALED

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip the norm of the unscaled gradients in the following `step`.

        Return the norm before, on the device.

        The update multiplies by the coefficient; the gradients stay as they are. Call it after the
        last backward of the step. With `enable=False` (bfloat16) a decorated optimizer does the
        same, others use torch's own clipping.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r}: must be a number of at least 0")
        engine = checked_engine(optimizer)
        if not self._enable:
            engine.refuse_fsdp1()
            if engine.attached:
                return engine.clip_next_step(max_norm)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            with outside_autocast():
                return nn.utils.clip_grad_norm_(params, max_norm)
        progress = self._progress_of(engine)
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("clip_grad_norm_() is called after step(): call it between backward() and step()")
        scale = self._scale_for(engine, "clip_grad_norm_") if progress.stage is Stage.INIT else None
        verdict = engine.check(scale, max_norm)
        progress.verdict = merge_verdicts(progress.verdict, verdict)
        progress.clip_coef = verdict.clip_coef
        assert verdict.total_norm is not None
        return verdict.total_norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step if its gradients are finite; otherwise change nothing.

        Returns what the optimizer's step returns. Gradients stay as they are. There is no host
        synchronisation, except that optimizers other than SGD, Adam and AdamW need one host read on
        CUDA.

        Skipped steps: on the CPU, and for optimizers other than those three, neither the
        optimizer's step hooks nor its `step` run, as with torch's scaler. The kernels for SGD, Adam
        and AdamW on CUDA decide on the device, and the host does not wait for them: there the hooks
        run in every step, skipped or not.

        Inside `auto_cast` this step is bit-identical to one outside: the policy applies neither to
        it nor to the step of a decorated optimizer. It does apply to `optimizer.step()` of a stock
        optimizer inside the region: at O2 parts of its arithmetic may be in half. Call that after
        the region.

        Args:
            optimizer: A torch optimizer, a wrapper of one that Accelerate made, or an object with
                `param_groups`, `step` and `zero_grad` (apex's LARC). A wrapper may decide to take
                no step, because it accumulates gradients. A LARC-like object steps by its own
                rules: its gradients are unscaled in place, and the host waits for CUDA.
            args: Passed on to the optimizer's step. A closure raises RuntimeError.
            kwargs: The same.
        """
        engine = checked_engine(optimizer)
        wrapper, optimizer = optimizer, engine.optimizer
        needs_step = self._enable and wrapper is not optimizer  # the wrapper must find ours
        if not engine.attached and (needs_step or (not engine.is_lookalike and engine.has_masters())):
            attach(optimizer)  # with masters: the model was decorated without its optimizer
        if not self._enable:
            return step_without_scale(engine, wrapper, args, kwargs)
        if args or kwargs:
            closure, args, kwargs = split_closure(args, kwargs)
            if closure is not None:
                raise RuntimeError(
                    "step() takes no closure: evaluate it before, scale(loss).backward(), then step(optimizer)"
                )
        if engine.needs_closure:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates a closure several times in one step, which a loss scale "
                "cannot follow: call optimizer.step(closure) without a scaler (bfloat16 needs none)"
            )
        progress = self._progress_of(engine)
        if progress.stage is Stage.STEPPED:
            raise RuntimeError("step() was already called on this optimizer since the last update(): call update()")
        self._watch.note_optimizer(optimizer)
        if engine.first_grad() is None:
            self._note_idle_step(optimizer)
            result = None
        else:
            if not engine.is_lookalike:
                warn_if_masters_are_missing(optimizer, is_by_scaler=True)
            result, verdict = self._take_step(engine, wrapper, progress, args, kwargs)
            if verdict is None:  # the wrapper still accumulates gradients
                self._has_idle_step = True
                return result
            self._note_step(optimizer, verdict)
        progress.stage = Stage.STEPPED
        if not self._dynamic:
            del self._progress[optimizer]
        return result

    def _take_step(
        self,
        engine: StepEngine,
        wrapper: Optimizer,
        progress: OptimizerProgress,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Verdict | None]:
        """Return what the step returns, and its verdict; None if a wrapper took no step."""
        optimizer: Any = engine.optimizer
        scale = self._scale_for(engine, "step") if progress.stage is Stage.INIT else None
        if getattr(optimizer, SUPPORTS_SCALING, False):
            if engine.takes_grad_scaler:
                return self._step_with_scaler(engine, wrapper, progress, scale, args, kwargs)
            scale = multiply_scale(scale, optimizer.__dict__.pop("grad_scale", None))
        request = StepRequest(scale=scale, verdict=progress.verdict, clip_coef=progress.clip_coef)
        try:
            result = engine.step_through_wrapper(request, wrapper, *args, **kwargs)
        except BaseException:
            if request.has_rewritten:  # a second try finds true gradients
                progress.stage, progress.verdict, progress.clip_coef = Stage.UNSCALED, request.verdict, None
            raise
        assert request.verdict is not None or wrapper is not optimizer
        return result, request.verdict

    def _step_with_scaler(
        self,
        engine: StepEngine,
        wrapper: Optimizer,
        progress: OptimizerProgress,
        scale: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Verdict]:
        """Pass the scaler to a step that takes it.

        That step unscales, perhaps by `unscale_`, and skips by itself.
        """
        progress.verdict = merge_verdicts(progress.verdict, engine.check(scale))
        request = StepRequest(clip_coef=progress.clip_coef, checks=False)
        result = engine.step_through_wrapper(request, wrapper, *args, grad_scaler=self, **kwargs)
        return result, progress.verdict

    def _note_idle_step(self, optimizer: Optimizer) -> None:
        self._has_idle_step = True
        self._watch.warn_once(
            "no gradient",
            f"step() found no gradient in this {type(optimizer).__name__}: nothing was updated, and the loss scale does not "
            "count it as a good step; call scale(loss).backward() before step() (precision.backward(loss), if you use "
            "mezzo.Precision), and zero_grad() after it, and check that the optimizer has the parameters that made the loss",
        )

    def _note_step(self, optimizer: Optimizer, verdict: Verdict) -> None:
        reference = weakref.ref(optimizer)
        for i, (other, earlier) in enumerate(self._stepped):
            # With a fixed scale update() may never be called: keep one verdict per optimizer
            if other == reference:
                self._stepped[i] = reference, merge_verdicts(earlier, verdict)
                return
        self._stepped.append((reference, verdict))

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale by the steps since the last update; call it once after them.

        Steps without any gradient do not count: if there was no other, the scale stays and no
        outcome hook is called.

        Args:
            new_scale: Set the scale to this instead, as torch does: the steps before are settled, but
                neither they nor the ratios move the scale, and no step is needed. A tensor is read,
                which waits for its device.

        Raises:
            RuntimeError: No step was taken since the last update, and there is no `new_scale`.
            LossScaleFloorError: Too many bad steps in a row with the scale at its minimum; on CUDA
                some steps late.
        """
        if not self._enable:
            return
        if new_scale is not None:
            new_scale = check_scale("new_scale", plain_number("new_scale", new_scale))
        has_idle_step, self._has_idle_step = self._has_idle_step, False
        if not self._stepped and (has_idle_step or new_scale is not None):
            self._progress.clear()
            if new_scale is not None:
                self._state.set_scale(new_scale)
            return
        if not self._stepped:
            raise RuntimeError("update() without a step since the last update(): call step(optimizer) first")
        stepped, self._stepped = self._stepped, []
        self._progress.clear()
        state = self._state
        with torch.no_grad(), outside_autocast():
            verdict = verdict_of_all([verdict for _, verdict in stepped], state.device)
            report = state.advance(verdict, self._rule, self._dynamic and new_scale is None)
            for guard in self._norms:
                guard.settle(verdict.found_inf)
            self._log.record(report, stepped)
            if new_scale is not None:
                state.set_scale(new_scale)
        self._log.process(self._rule.max_skips_at_floor)

    def minimize(
        self, optimizer: Optimizer, loss: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, Sequence[tuple[Tensor, Tensor]]]:
        """Take a step and update the scale.

        Args:
            optimizer: As for `step`.
            loss: Not used; Paddle's signature has it. Call its `backward` before.
            args: Passed on to `step`.
            kwargs: The same.

        Returns:
            What the optimizer's step returns, and pairs of parameters and gradients, as Paddle's.
            The pairs are collected at the first access: look at them before `zero_grad()`.
        """
        result = self.step(optimizer, *args, **kwargs)
        self.update()
        return result, ParamsAndGrads(optimizer)

    # Outcomes of the steps

    @property
    def skipped_steps(self) -> int:
        """Number of updates that found an overflow, as far as the host knows.

        Does not wait for the device.
        """
        self._log.poll()
        return self._log.skipped

    @property
    def known_scale(self) -> float:
        """The scale, as far as the host knows; 1.0 if not enabled. Does not wait for the device."""
        if not self._enable:
            return 1.0
        self._log.poll()
        for scale in (self._state.known_scale(), self._log.last_scale):
            if scale is not None:
                return scale
        return self._state.placed_scale()

    def register_outcome_hook(self, hook: Callable[[bool], object]) -> OutcomeHandle:
        """Call `hook(taken)` once per update, in order, on CUDA possibly some steps late.

        An update after steps without any gradient calls no hook.

        For LR schedulers: `lambda taken: scheduler.step() if taken else None`.
        """
        return self._log.add_hook(hook)

    def flush(self) -> None:
        """Wait for the device and process all outcomes."""
        self._log.wait()
        # Also steps replayed from a CUDA graph
        self._log.skipped = int(self._state.read()["skipped_steps"])
        self._log.process(self._rule.max_skips_at_floor)

    def name_parameters(self, model: nn.Module) -> None:
        """Remember the parameter names of a model, for the message of `LossScaleFloorError`."""
        remember_names(model)

    def protect_batch_norm(self, model: nn.Module) -> None:
        """Restore the running statistics of normalisation layers after a skipped step."""
        self._norms.append(NormGuard(model))

    # Saving

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the settings and the state, without hooks and protected models.

        A subclass is restored without a call of its `__init__`, with the attributes that it added.

        Raises:
            RuntimeError: Between `unscale_`, `clip_grad_norm_` or `step` and `update`: the copy
                would lose the progress.
        """
        if any(progress.is_begun for progress in self._progress.values()):
            raise RuntimeError(
                "a GradScaler cannot be pickled or copied between unscale_(), clip_grad_norm_() or step() and update(): "
                "do it after update()"
            )
        own = vars(GradScaler(enable=self._enable))
        added = {name: value for name, value in vars(self).items() if name not in own}
        return _restore, (type(self), self._enable, self.state_dict(), added)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers; waits for the device. Empty if not enabled."""
        if not self._enable:
            return {}
        return pack_state(self._rule, self._dynamic, self._state.read())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a `GradScaler`, a Paddle scaler or a torch.amp.GradScaler.

        The progress of the current step is kept: gradients that `unscale_` divided are not divided
        again.

        Raises:
            RuntimeError: The dictionary is empty: it came from a scaler that was not enabled.
            ValueError: A key is missing, or a value is out of range. Nothing is changed then.
        """
        if not self._enable:
            return
        saved = unpack_state(state_dict, self._rule, self._dynamic)
        self._rule, self._dynamic = saved.rule, saved.dynamic
        self._init_scale = saved.values["scale"]
        self._state.write(saved.values)
        self._log.restart(int(saved.values["skipped_steps"]))

    # Methods of torch's scaler that optimizers with a `grad_scaler` argument call

    def _get_scale_async(self) -> Tensor | None:
        """Return the live scale on its device, None before the first loss.

        No host synchronisation.
        """
        return self._state.scale if self._enable and self._state.is_placed else None

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """Return 1.0 on the device if the gradients of an optimizer overflowed, otherwise 0.0."""
        engine = checked_engine(optimizer)
        progress = self._progress_of(engine)
        if progress.verdict is None:
            progress.verdict = engine.check(self._scale_for(engine, "step"))
        found_inf = progress.verdict.found_inf
        return {found_inf.device: found_inf}

    @property
    def captured(self) -> CapturedScaling:
        """For graph mode, which captures the steps of the scaler; training loops do not need it."""
        return CapturedScaling(self)

    def _progress_of(self, engine: StepEngine) -> OptimizerProgress:
        engine.refuse_fsdp1()
        return self._progress.setdefault(engine.optimizer, OptimizerProgress())

    def _scale_for(self, engine: StepEngine, call: str) -> Tensor:
        """Return the scale that the gradients carry, on their device."""
        if not self._state.is_placed:
            self._state.place(engine.device)
            self._watch.warn_once(
                "unscaled loss",
                f"{call}() before any scale(): the gradients carry no loss scale and are divided by it all the same, so "
                "nothing is learned; instead of loss.backward() call scaler.scale(loss).backward(), or "
                "precision.backward(loss) if you use mezzo.Precision",
            )
        return self._state.scale_on(engine.device)


def _restore(
    kind: type[GradScaler], enable: bool, state: dict[str, Any], added: Mapping[str, Any] | None = None
) -> GradScaler:
    scaler = kind.__new__(kind)  # a subclass may have another signature, such as torch's
    GradScaler.__init__(scaler, enable=enable)
    GradScaler.load_state_dict(scaler, state)
    vars(scaler).update(added or {})  # pickles of 0.2.0 have none
    return scaler
