"""Loss scaling whose state lives on the device: a step and its update never wait for it."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._torch.optimizers import SUPPORTS_SCALING
from mezzo.amp._scaler_norms import NormGuard
from mezzo.amp._scaler_outcome import LossScaleFloorError, OutcomeHandle, OutcomeLog
from mezzo.amp._scaler_settings import ScalerSettings
from mezzo.amp._scaler_state import (
    ScaleRule,
    ScaleState,
    check_enable,
    check_flag,
    check_rule,
    check_scale,
    check_values,
    plain_number,
)
from mezzo.amp._scaler_watch import ScaleWatch
from mezzo.amp._steps import warn_if_masters_are_missing
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.optim import (
    StepEngine,
    StepRequest,
    Verdict,
    attach,
    engine_of,
    forget_casts,
    keep_autocast,
    outside_autocast,
    remember_names,
    split_closure,
)

__all__ = ["GradScaler", "LossScaleFloorError"]

T = TypeVar("T")


class _Stage(enum.Enum):
    INIT = 0
    UNSCALED = 1
    STEPPED = 2


class _Progress:
    """How far one optimizer is since the last update."""

    def __init__(self) -> None:
        self.stage = _Stage.INIT
        self.verdict: Verdict | None = None
        self.clip_coef: Tensor | None = None

    @property
    def is_begun(self) -> bool:
        """Whether anything is known that a copy of the scaler would not know."""
        return self.stage is not _Stage.INIT or self.verdict is not None


def _from_torch(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a torch.amp.GradScaler under our names; any other state as it is."""
    if "growth_factor" not in values:
        return values
    names = {
        "scale": "scale",
        "growth_factor": "incr_ratio",
        "backoff_factor": "decr_ratio",
        "growth_interval": "incr_every_n_steps",
        "_growth_tracker": "incr_count",
    }
    known = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    return {**known, "decr_every_n_nan_or_inf": 1, "decr_count": 0}  # torch shrinks at every bad step


def _restore(kind: type[GradScaler], enable: bool, state: dict[str, Any]) -> GradScaler:
    scaler = kind(enable=enable)
    scaler.load_state_dict(state)
    return scaler


def _checked_engine(optimizer: Any) -> StepEngine:
    """Return the engine of an optimizer, or of an object that looks like one."""
    looks = isinstance(optimizer, Optimizer) or all(
        hasattr(optimizer, n) for n in ("param_groups", "step", "zero_grad")
    )
    if not looks:
        raise TypeError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; an object with param_groups, step and "
            "zero_grad, as apex's LARC, is taken too"
        )
    return engine_of(optimizer)


class _ParamsAndGrads(Sequence[tuple[Tensor, Tensor]]):
    """Parameters with their gradients, collected at the first look: most callers never do, and hundreds take long."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @functools.cached_property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(p, p.grad) for p in params if p.grad is not None]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        return self._pairs[index]

    def __eq__(self, other: object) -> bool:
        return self._pairs == (other._pairs if isinstance(other, _ParamsAndGrads) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._pairs)


class GradScaler(ScalerSettings):
    """Scales the loss so that half gradients do not vanish, and skips steps whose gradients overflow.

    Per optimizer and step: `scale(loss).backward()`, then `step(optimizer)`, then `update()` once for all of them.
    Each optimizer skips by its own gradients; the scale sees all.

    Args:
        enable: Off: `scale` returns its argument, `step` and `minimize` call the optimizer, nothing else happens. A device
            (`"cuda"`), torch's first argument, means on.
        init_loss_scaling: First scale.
        incr_ratio: Growth factor, above 1.
        decr_ratio: Shrink factor, between 0 and 1.
        incr_every_n_steps: Good steps in a row before growth; 0: never.
        decr_every_n_nan_or_inf: Bad steps in a row before shrinking; 0: never.
        use_dynamic_loss_scaling: False: the scale stays.
        min_loss_scaling: Shrinking ends here (a first scale below it is legal). 0: no floor.
        max_skips_at_floor: Bad steps in a row with the scale at its floor that end training with
            `LossScaleFloorError`; None: no limit.

    >>> scaler = GradScaler(init_loss_scaling=4.0, decr_every_n_nan_or_inf=1)
    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler.scale(weight.sum() * float("inf")).backward()
    >>> _ = scaler.minimize(optimizer)
    >>> weight.item(), scaler.get_scale(), scaler.skipped_steps
    (1.0, 2.0, 1)
    """

    def __init__(
        self,
        enable: bool | str | torch.device = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 2,
        use_dynamic_loss_scaling: bool = True,
        min_loss_scaling: float = 1.0,
        max_skips_at_floor: int | None = 25,
    ) -> None:
        self._enable = check_enable(enable)
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
        self._progress: weakref.WeakKeyDictionary[Optimizer, _Progress] = weakref.WeakKeyDictionary()
        self._stepped: list[tuple[weakref.ref[Optimizer], Verdict]] = []
        self._has_idle_step = False
        self._log = OutcomeLog()
        self._norms: list[NormGuard] = []
        if self._enable:
            self._watch = ScaleWatch()

    def __repr__(self) -> str:
        """Return settings and state; never waits for the device, where the scale of the last known update is shown."""
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
        """Return a tensor, or an iterable of them, times the scale; half tensors become float32.

        A list or tuple stays one; of another iterable an iterator is returned. A half loss is warned about, once.
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
                    "auto_cast, and may have lost digits or overflowed; compute the loss inside auto_cast, where losses "
                    "are float32, or from outputs.float()",
                )
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Rewrite the gradients as true float32 values, to look at or to change before `step`.

        The one call that rewrites gradients; `step` works without it.
        """
        if not self._enable:
            return
        engine = _checked_engine(optimizer)
        progress = self._progress_of(engine)
        if progress.stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() was already called on this optimizer since the last update()")
        if progress.stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is called after step(): call update() before the next step begins")
        scale = self._scale_for(engine, "unscale_")
        self._watch.note_optimizer(optimizer)
        progress.verdict = _merge(progress.verdict, engine.check(scale))
        engine.unscale_grads_(scale)
        progress.stage = _Stage.UNSCALED

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip the norm of the true gradients in the following `step`; return the norm before, on the device.

        Nothing is rewritten: the coefficient is folded into the update. Call it after the last backward of the step. The
        same without a scale (`enable=False`, bfloat16), if the optimizer is decorated; else torch's own clipping.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r}: must be a number of at least 0")
        engine = _checked_engine(optimizer)
        if not self._enable:
            engine.refuse_fsdp1()
            if engine.attached:
                return engine.clip_next_step(max_norm)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            with outside_autocast():
                return nn.utils.clip_grad_norm_(params, max_norm)
        progress = self._progress_of(engine)
        if progress.stage is _Stage.STEPPED:
            raise RuntimeError("clip_grad_norm_() is called after step(): call it between backward() and step()")
        scale = self._scale_for(engine, "clip_grad_norm_") if progress.stage is _Stage.INIT else None
        verdict = engine.check(scale, max_norm)
        progress.verdict = _merge(progress.verdict, verdict)
        progress.clip_coef = verdict.clip_coef
        assert verdict.total_norm is not None
        return verdict.total_norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer's step if its gradients are finite, else leave everything as it is.

        Returns what the optimizer's step returns. Neither rewrites gradients nor waits for the device (optimizers other
        than SGD, Adam and AdamW need one host read on CUDA).

        Skipped steps: on the CPU, and for optimizers other than those three, neither the optimizer's step hooks nor its
        `step` run, as with torch's scaler. The kernels for SGD, Adam and AdamW on CUDA decide on the device, and the host
        does not wait for them: there the hooks run in every step, skipped or not.

        Inside `auto_cast` this is the same step, bit for bit, as outside: no policy applies to it, nor to the step of a
        decorated optimizer. A stock optimizer that is stepped by itself, `optimizer.step()`, inside the region follows the
        policy: at O2 parts of its arithmetic may be in half. Call it after the region.

        Args:
            optimizer: A torch optimizer, or an object with `param_groups`, `step` and `zero_grad` (apex's LARC). The latter
                steps by its own rules, so its gradients are rewritten as by `unscale_`, and CUDA is waited for.
            args: Handed on to the optimizer's step; a closure is refused.
            kwargs: The same.
        """
        engine = _checked_engine(optimizer)
        if not engine.attached and not engine.is_duck and engine.has_masters():
            attach(optimizer)  # the model was decorated alone; its optimizer joins here
        if not self._enable:
            return _step_without_scale(engine, args, kwargs)
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
        if progress.stage is _Stage.STEPPED:
            raise RuntimeError("step() was already called on this optimizer since the last update(): call update()")
        self._watch.note_optimizer(optimizer)
        if engine.first_grad() is None:
            self._note_idle_step(optimizer)
            result = None
        else:
            if not engine.is_duck:
                warn_if_masters_are_missing(optimizer, is_by_scaler=True)
            result, verdict = self._take_step(engine, progress, args, kwargs)
            self._note_step(optimizer, verdict)
        progress.stage = _Stage.STEPPED
        if not self._dynamic:
            del self._progress[optimizer]
        return result

    def _take_step(
        self, engine: StepEngine, progress: _Progress, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Verdict]:
        optimizer: Any = engine.optimizer
        scale = self._scale_for(engine, "step") if progress.stage is _Stage.INIT else None
        if getattr(optimizer, SUPPORTS_SCALING, False):
            if engine.takes_grad_scaler:
                return self._step_with_scaler(engine, progress, scale, args, kwargs)
            scale = _times(scale, optimizer.__dict__.pop("grad_scale", None))
        request = StepRequest(scale=scale, verdict=progress.verdict, clip_coef=progress.clip_coef)
        try:
            result = engine.step_through_wrapper(request, *args, **kwargs)
        except BaseException:
            if request.has_rewritten:  # a second try finds true gradients
                progress.stage, progress.verdict, progress.clip_coef = _Stage.UNSCALED, request.verdict, None
            raise
        assert request.verdict is not None
        return result, request.verdict

    def _step_with_scaler(
        self,
        engine: StepEngine,
        progress: _Progress,
        scale: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Verdict]:
        """Hand the scaler to a step that takes it: the step unscales, perhaps by `unscale_`, and skips by itself."""
        progress.verdict = _merge(progress.verdict, engine.check(scale))
        request = StepRequest(clip_coef=progress.clip_coef, checks=False)
        result = engine.step_through_wrapper(request, *args, grad_scaler=self, **kwargs)
        return result, progress.verdict

    def _note_idle_step(self, optimizer: Optimizer) -> None:
        self._has_idle_step = True
        self._watch.warn_once(
            "no gradient",
            f"step() found no gradient in this {type(optimizer).__name__}: nothing was updated, and the loss scale does not "
            "count it as a good step; call scale(loss).backward() before step(), and zero_grad() after it, and check that "
            "the optimizer has the parameters that made the loss",
        )

    def _note_step(self, optimizer: Optimizer, verdict: Verdict) -> None:
        reference = weakref.ref(optimizer)
        for i, (other, earlier) in enumerate(self._stepped):
            if other == reference:  # fixed scaling, where update() may never be called: keep one verdict, not all
                self._stepped[i] = reference, _merge(earlier, verdict)
                return
        self._stepped.append((reference, verdict))

    def update(self) -> None:
        """Adjust the scale by what the steps since the last update found; call it once after them.

        Steps that found no gradient do not count: if there was no other, the scale stays and no outcome hook is called.

        Raises:
            RuntimeError: No step was taken since the last update.
            LossScaleFloorError: Too many bad steps in a row at the floor, as soon as the host knows.
        """
        if not self._enable:
            return
        has_idle_step, self._has_idle_step = self._has_idle_step, False
        if not self._stepped and has_idle_step:
            self._progress.clear()
            return
        if not self._stepped:
            raise RuntimeError("update() without a step since the last update(): call step(optimizer) first")
        stepped, self._stepped = self._stepped, []
        self._progress.clear()
        state = self._state
        with torch.no_grad(), outside_autocast():
            verdict = _of_all([verdict for _, verdict in stepped], state.device)
            report = state.advance(verdict, self._rule, self._dynamic)
            for guard in self._norms:
                guard.settle(verdict.found_inf)
            self._log.record(report, stepped)
        self._log.process(self._rule.max_skips_at_floor)

    def minimize(
        self, optimizer: Optimizer, loss: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, Sequence[tuple[Tensor, Tensor]]]:
        """Take a step and update the scale.

        Args:
            optimizer: As for `step`.
            loss: For the documents' signature; its backward ran before.
            args: Handed on to `step`.
            kwargs: The same.

        Returns:
            What the optimizer's step returns, and the parameters with their gradients: a pair, as Paddle's. The pairs
            are collected when they are first looked at: do it before `zero_grad()`.
        """
        result = self.step(optimizer, *args, **kwargs)
        self.update()
        return result, _ParamsAndGrads(optimizer)

    # What became of the steps

    @property
    def skipped_steps(self) -> int:
        """How many updates found an overflow, as far as the host knows; never waits."""
        self._log.poll()
        return self._log.skipped

    def register_outcome_hook(self, hook: Callable[[bool], object]) -> OutcomeHandle:
        """Call `hook(taken)` once per update, in order, on CUDA possibly some steps late.

        An update that follows only idle steps (no parameter had a gradient) calls no hook.

        For LR schedulers: `lambda taken: scheduler.step() if taken else None`.
        """
        return self._log.add_hook(hook)

    def flush(self) -> None:
        """Wait for the device and process all outcomes that are still on their way."""
        self._log.wait()
        self._log.skipped = int(self._state.read()["skipped_steps"])  # also steps replayed from a CUDA graph
        self._log.process(self._rule.max_skips_at_floor)

    def name_parameters(self, model: nn.Module) -> None:
        """Remember the parameter names of a model, for the message of `LossScaleFloorError`."""
        remember_names(model)

    def protect_batch_norm(self, model: nn.Module) -> None:
        """Keep the running statistics of normalisation layers from before the step when that step is skipped."""
        self._norms.append(NormGuard(model))

    # Saving

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the settings and the state; hooks and protected models belong to this process.

        Raises:
            RuntimeError: A step has begun: the copy would not know whose gradients are unscaled already.
        """
        if any(progress.is_begun for progress in self._progress.values()):
            raise RuntimeError(
                "a GradScaler cannot be pickled or copied between unscale_(), clip_grad_norm_() or step() and update(): "
                "do it after update()"
            )
        return _restore, (type(self), self._enable, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers; waits for the device. Empty if not enabled."""
        if not self._enable:
            return {}
        rule = self._rule
        return {
            "incr_ratio": rule.incr_ratio,
            "decr_ratio": rule.decr_ratio,
            "incr_every_n_steps": rule.incr_every_n_steps,
            "decr_every_n_nan_or_inf": rule.decr_every_n_nan_or_inf,
            "use_dynamic_loss_scaling": self._dynamic,
            "min_loss_scaling": rule.min_loss_scaling,
            "max_skips_at_floor": rule.max_skips_at_floor,
            **self._state.read(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, a Paddle scaler's (one-element arrays, none of our keys) or a torch.amp one's.

        A step that has begun goes on: gradients that `unscale_` rewrote are not divided again.

        Raises:
            RuntimeError: The dictionary is empty: it came from a scaler that was not enabled.
            ValueError: A key of the documents is missing, or a value is out of range. Nothing was changed then.
        """
        if not self._enable:
            return
        if not state_dict:
            raise RuntimeError("the state dict is empty: it was saved by a GradScaler with enable=False")
        values = _from_torch({key: plain_number(key, value) for key, value in state_dict.items()})
        missing = [key for key in ("scale", *_RULE_KEYS, "incr_count", "decr_count") if key not in values]
        if missing:
            raise ValueError(f"the state dict of the scaler lacks {', '.join(missing)}")
        rule = ScaleRule(**{key: values.get(key, getattr(self._rule, key)) for key in ScaleRule.field_names()})
        dynamic = check_flag("use_dynamic_loss_scaling", values.get("use_dynamic_loss_scaling", self._dynamic))
        self._rule, state = check_rule(rule), check_values(values)
        self._dynamic = dynamic
        self._init_scale = state["scale"]
        self._state.write(state)
        self._log.restart(int(state["skipped_steps"]))

    # What optimizers that take the scaler ask it, under torch's names

    def _get_scale_async(self) -> Tensor | None:
        """Return the live scale on its device, None before the first loss; no host synchronisation."""
        return self._state.scale if self._enable and self._state.is_placed else None

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """Return, on the device, whether the gradients of an optimizer overflowed: 1.0 or 0.0."""
        engine = _checked_engine(optimizer)
        progress = self._progress_of(engine)
        if progress.verdict is None:
            progress.verdict = engine.check(self._scale_for(engine, "step"))
        found_inf = progress.verdict.found_inf
        return {found_inf.device: found_inf}

    # Inside

    @property
    def captured(self) -> CapturedScaling:
        """What graph mode needs of a scaler whose steps it captures; training loops have no use for it."""
        return CapturedScaling(self)

    def _progress_of(self, engine: StepEngine) -> _Progress:
        engine.refuse_fsdp1()
        return self._progress.setdefault(engine.optimizer, _Progress())

    def _scale_for(self, engine: StepEngine, call: str) -> Tensor:
        """Return the scale that the gradients carry, on their device."""
        if not self._state.is_placed:
            self._state.place(engine.device)
            self._watch.warn_once(
                "unscaled loss",
                f"{call}() before any scale(): the gradients carry no loss scale and are divided by it all the same, so "
                "nothing is learned; call scaler.scale(loss).backward() instead of loss.backward()",
            )
        return self._state.scale_on(engine.device)


class CapturedScaling:
    """A scaler as graph mode sees it: its `step` and `update` run inside a CUDA graph, and the host learns of it later."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, steps are only tried: no outcome hook is called, and the scaler's state is put back afterwards."""
        scaler = self._scaler
        state, log = scaler._state.read(), scaler._log
        scaler._log = OutcomeLog()
        try:
            yield
        finally:
            scaler._log = log
            scaler._state.write(state)
            scaler._has_idle_step = False
            scaler._progress.clear()
            scaler._stepped.clear()
            for guard in scaler._norms:
                guard.refresh()

    @property
    def settings(self) -> tuple[ScaleRule, bool]:
        """What a captured update has built in; once it differs, the step must be captured again."""
        return self._scaler._rule, self._scaler._dynamic

    def take_outcome(self) -> Any:
        """Return what `note_replay` needs of the update that was just captured."""
        return self._scaler._log.take_captured()

    def note_replay(self, outcome: Any) -> None:
        """Learn, late, what became of a replayed step; raises what `GradScaler.update` raises."""
        scaler = self._scaler
        scaler._log.record(*outcome)
        scaler._log.process(scaler._rule.max_skips_at_floor)


_RULE_KEYS = ("incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf")


def _step_without_scale(engine: StepEngine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the optimizer's step outside of the policy; its closure still sees the policy."""
    if engine.attached:
        return engine.optimizer.step(*args, **kwargs)
    closure, _, _ = split_closure(args, kwargs)
    if closure is not None:
        kept = keep_autocast(closure)
        args = tuple(kept if value is closure else value for value in args)
        kwargs = {name: kept if value is closure else value for name, value in kwargs.items()}
    step: Any = engine.optimizer.step
    with outside_autocast():
        result = step(*args, **kwargs)
    forget_casts()
    return result


def _times(scale: Tensor | None, more: Any) -> Tensor | None:
    """Return a scale times the `grad_scale` that the user set on an optimizer, which torch's scaler multiplies too."""
    if more is None:
        return scale
    factor: Tensor = torch.as_tensor(more, dtype=torch.float32)
    with outside_autocast():
        return factor if scale is None else scale * factor.to(scale.device, non_blocking=True)


def _merge(old: Verdict | None, new: Verdict) -> Verdict:
    """Return a verdict that is bad if either is: gradients rewritten in between may hide what the first one saw."""
    if old is None:
        return new
    with outside_autocast():
        found_inf = torch.maximum(old.found_inf, new.found_inf)
        first_bad = torch.where(old.first_bad >= 0, old.first_bad, new.first_bad)
    return Verdict(found_inf, first_bad, new.total_norm, new.clip_coef)


def _of_all(verdicts: list[Verdict], device: torch.device) -> Verdict:
    """Return the verdict over several optimizers, on the scaler's device."""
    found = [verdict.found_inf.to(device, non_blocking=True) for verdict in verdicts]
    if len(verdicts) == 1 and found[0] is verdicts[0].found_inf:
        return verdicts[0]
    return Verdict(torch.stack(found).amax(), verdicts[0].first_bad.to(device, non_blocking=True))
