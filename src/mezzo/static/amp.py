"""Mixed precision of programs: `decorate` an optimizer, then call `minimize` and `amp_init`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.amp import Excluded, Fp8Recipe, GradScaler, Policy, parse_master_weight
from mezzo.amp import decorate as decorate_model
from mezzo.dtypes import parse_half_dtype, parse_level
from mezzo.static._current import check_minimize
from mezzo.static._executor import Executor
from mezzo.static._program import Program, Training
from mezzo.static._region import CastRules, NoGuardError, fp16_guard
from mezzo.static._variables import ProgramError, Variable

__all__ = [
    "decorate",
    "CustomOpLists",
    "AutoMixedPrecisionLists",
    "MixedPrecisionOptimizer",
    "fp16_guard",
    "NoGuardError",
    "cast_model_to_fp16",
    "cast_parameters_to_fp16",
]


class CustomOpLists:
    """Operators and variables whose precision differs from the defaults.

    Args:
        custom_white_list: Operators to compute in half.
        custom_black_list: Operators to compute in float32.
        custom_black_varnames: Inputs, results and parameters of a program; calls that use them are
            float32.
        dtype: The half dtype of the program, `float16` or `bfloat16`; None: as `decorate` says. One that
            differs from that of `decorate` is an error there.

    >>> CustomOpLists(custom_black_list=["softmax"]).custom_black_list
    frozenset({'softmax'})
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        white, black = (
            list(names) if isinstance(names, Iterator) else names for names in (custom_white_list, custom_black_list)
        )
        # Report wrong lists now, not when a program is closed.
        Policy.create("O1", custom_white_list=white, custom_black_list=black)
        self.custom_white_list = frozenset(white or ())
        self.custom_black_list = frozenset(black or ())
        if isinstance(custom_black_varnames, str):
            raise TypeError(f"custom_black_varnames={custom_black_varnames!r}: give a list of names")
        self.custom_black_varnames = frozenset(custom_black_varnames or ())
        self.dtype = None if dtype is None else parse_half_dtype(dtype)

    def refuse_other_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError if the lists are for another dtype."""
        if self.dtype not in (None, dtype):
            raise ValueError(f"amp_lists are for {self.dtype}, but the program is {dtype}: give one dtype")


AutoMixedPrecisionLists = CustomOpLists
"""Another name of `CustomOpLists`, as in Paddle."""


class MixedPrecisionOptimizer:
    """An optimizer that trains a program in mixed precision; made by `decorate`.

    Other attributes (`param_groups`, `state_dict`, ...) are those of the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        precision: CastRules,
        scaler: GradScaler,
        master_weight: bool | Literal["compact"] | None,
        master_grad: bool,
        half_layers: Excluded | Sequence[Excluded] | None = None,
    ) -> None:
        self.optimizer, self.precision, self.scaler = optimizer, precision, scaler
        self._master_weight, self._master_grad, self._half_layers = master_weight, master_grad, half_layers
        self._program: Program | None = None
        self._is_prepared = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":  # copy.copy reads them before `optimizer` is set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def minimize(self, loss: Variable, startup_program: Program | None = None, max_norm: float | None = None) -> None:
        """Close the program of a loss: from now on, a run is a training step in mixed precision.

        Args:
            loss: One number.
            startup_program: Accepted without effect.
            max_norm: Clip the norm of the true gradients to this.

        Raises:
            NoGuardError: `use_fp16_guard` is on, and nothing was written inside `fp16_guard()`.
        """
        check_minimize(self.optimizer, loss)
        training = Training(loss, self.optimizer, self.scaler, max_norm, self._before_first_run)
        loss._program.close(training, self.precision)
        self._program = loss._program

    def amp_init(
        self,
        place: str | torch.device | None = None,
        scope: Any = None,
        test_program: Program | None = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Move the weights to a device and, at O2 and O3, store them in half with float32 masters.

        Args:
            place: As for `Executor`; None leaves the weights where they are.
            scope: Accepted without effect; parameters belong to modules.
            test_program: A clone of the program, to run in the same precision: at O2 and O3 always,
                at O1 with `use_fp16_test`.
            use_fp16_test: See `test_program`.
            rewrite_master_weight: Accepted without effect: masters always hold the float32 weights.

        Raises:
            ProgramError: `minimize` was not called.
        """
        program = self._closed("amp_init")
        if place is not None:
            program.to(Executor(place).device)
        level = self.precision.policy.level if self.precision.policy is not None else "O0"
        if level in _STORED_IN_HALF:
            self._keep_half_weights()
        if test_program is not None and (level in _STORED_IN_HALF or use_fp16_test):
            test_program.precision = self.precision

    def get_loss_scaling(self) -> float:
        """Return the loss scale.

        Raises:
            ProgramError: `minimize` was not called.
        """
        self._closed("get_loss_scaling")
        return self.scaler.get_scale()

    def _closed(self, what: str) -> Program:
        if self._program is None:
            raise ProgramError(f"call minimize(loss) before {what}: it chooses the program")
        return self._program

    def _before_first_run(self) -> None:
        """At O1 store weights in half now; at O2 and O3 `amp_init` does it."""
        level = self.precision.policy.level if self.precision.policy is not None else "O0"
        if level == "O1":
            self._keep_half_weights()
        elif level in _STORED_IN_HALF and not self._is_prepared:
            warnings.warn(
                "amp_init was not called: weights stay float32 and are cast in every step; call optimizer.amp_init(device) "
                "after minimize",
                UserWarning,
                stacklevel=5,
            )

    def _keep_half_weights(self) -> None:
        """Store in half the parameters that only half operators use."""
        policy, program = self.precision.policy, self._closed("amp_init")
        if policy is None or self._is_prepared:
            return
        self._is_prepared = True
        decorate_model(
            program.calls.root, self.optimizer, policy.level, policy.dtype, self._master_weight,
            master_grad=self._master_grad, excluded_layers=program.calls.constants,
            excluded_parameters=_used_in_float32(program, self.precision), half_layers=self._half_layers, fp8=policy.fp8,
        )  # fmt: skip


_STORED_IN_HALF = ("O2", "O3")
"""Levels at which `amp_init` stores all weights in half."""
_OPERATORS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}


def _used_in_float32(program: Program, precision: CastRules) -> list[nn.Parameter]:
    """Return the parameters used in float32: outside guards, or black by name or operator."""
    assert precision.policy is not None
    black_list = precision.policy.black
    black = {id(p) for p in program.calls.trials.parameters_outside_guard()} if precision.use_guard else set()
    names = program.calls.parameter_names()
    black |= {key for key, name in names.items() if name in precision.float32_names}
    for part in program.calls.root.modules():
        if any(isinstance(part, kind) and op in black_list for kind, op in _OPERATORS.items()):
            black |= {id(p) for p in part.parameters(recurse=False)}
    return [p for p in program.parameters() if id(p) in black]


def decorate(
    optimizer: Optimizer,
    amp_lists: CustomOpLists | None = None,
    *,
    level: str | None = None,
    dtype: str | torch.dtype = "float16",
    master_weight: bool | Literal["compact"] | None = None,
    master_grad: bool = False,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool | None = None,
    use_pure_fp16: bool | None = None,
    use_fp16_guard: bool | None = None,
    use_amp_guard: bool | None = None,
    use_bf16: bool = False,
    use_promote: bool = True,
    cpu_compute: str = "auto",
    fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    half_layers: Excluded | Sequence[Excluded] | None = None,
) -> MixedPrecisionOptimizer:
    """Return an optimizer whose `minimize` makes a program train in mixed precision.

    Args:
        optimizer: A torch optimizer.
        amp_lists: Operators and variables that differ from the defaults.
        level: `O0`, `OD`, `O1` (the default), `O2` or `O3`.
        dtype: `float16` or `bfloat16`.
        master_weight: See `mezzo.amp.decorate`.
        master_grad: O2 and O3: gradients of half weights arrive in float32.
        init_loss_scaling: The first loss scale; this and the next four arguments are those of
            `mezzo.amp.GradScaler`.
        incr_every_n_steps: Steps without overflow before the scale grows.
        decr_every_n_nan_or_inf: Overflows before it shrinks.
        incr_ratio: By how much it grows.
        decr_ratio: By how much it shrinks.
        use_dynamic_loss_scaling: None: only for float16.
        use_pure_fp16: The older spelling of `level='O2'`; not together with `level`.
        use_fp16_guard: Only calls inside `fp16_guard()` are half. None: on with `use_pure_fp16`,
            otherwise off.
        use_amp_guard: The newer name of `use_fp16_guard`.
        use_bf16: The older spelling of `dtype='bfloat16'`.
        use_promote: See `mezzo.amp.auto_cast`.
        cpu_compute: See `mezzo.amp.Policy`.
        fp8: O3: see `mezzo.amp.auto_cast`.
        half_layers: O3: see `mezzo.amp.decorate`. Names begin with the name of the module in the
            program, as in `Net_0.head`.

    Raises:
        TypeError: `level` and `use_pure_fp16`, or both names of the guard, were given; or
            `optimizer` is not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"decorate: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if amp_lists is not None and not isinstance(amp_lists, CustomOpLists):
        raise TypeError(f"amp_lists: {type(amp_lists).__name__} is not a mezzo.static.amp.CustomOpLists")
    if level is not None and use_pure_fp16 is not None:
        raise TypeError("give level or use_pure_fp16, not both: use_pure_fp16=True is level='O2'")
    if use_fp16_guard is not None and use_amp_guard is not None:
        raise TypeError("give use_fp16_guard or use_amp_guard, not both: they are two names of one option")
    chosen = parse_level(level if level is not None else "O2" if use_pure_fp16 else "O1")
    half = torch.bfloat16 if use_bf16 else parse_half_dtype(dtype)
    guard = use_fp16_guard if use_fp16_guard is not None else use_amp_guard
    lists = amp_lists or CustomOpLists()
    lists.refuse_other_dtype(half)
    policy = Policy.create(
        chosen, half, lists.custom_white_list, lists.custom_black_list, use_promote, cpu_compute, fp8
    )  # fmt: skip
    parse_master_weight(master_weight)  # report a wrong value now, not when the program is closed
    if half_layers is not None and chosen != "O3":
        raise ValueError(f"half_layers with level={chosen!r}: it belongs to level O3")
    precision = CastRules(policy, bool(use_pure_fp16) if guard is None else guard, lists.custom_black_varnames)
    scales = chosen != "O0" and (half is torch.float16 or bool(use_dynamic_loss_scaling))
    scaler = GradScaler(
        enable=scales,
        init_loss_scaling=init_loss_scaling,
        incr_ratio=incr_ratio,
        decr_ratio=decr_ratio,
        incr_every_n_steps=incr_every_n_steps,
        decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        use_dynamic_loss_scaling=use_dynamic_loss_scaling is not False,
    )
    return MixedPrecisionOptimizer(optimizer, precision, scaler, master_weight, master_grad, half_layers)


def cast_model_to_fp16(
    program: Program,
    amp_lists: CustomOpLists | None = None,
    use_fp16_guard: bool = True,
    dest_type: str | torch.dtype = "float16",
    level: str = "O2",
    use_promote: bool = True,
) -> set[str]:
    """Make a program without an optimizer run in mixed precision; `decorate` does it for training.

    Args:
        program: Written, and not closed by `minimize`.
        amp_lists: Operators and variables that differ from the defaults.
        use_fp16_guard: Only calls inside `fp16_guard()` are half.
        dest_type: `float16` or `bfloat16`.
        level: `O0`, `OD`, `O1`, `O2` or `O3`.
        use_promote: See `mezzo.amp.auto_cast`.

    Returns:
        The names of the parameters that half operators use. Those of norm layers are among them,
        although `cast_parameters_to_fp16` leaves them in float32.

    Raises:
        ProgramError: The program is closed, or a name of `custom_black_varnames` is not in it.
        NoGuardError: `use_fp16_guard` is on, and nothing was written inside `fp16_guard()`.
    """
    lists, half = amp_lists or CustomOpLists(), parse_half_dtype(dest_type)
    lists.refuse_other_dtype(half)
    policy = Policy.create(parse_level(level), half, lists.custom_white_list, lists.custom_black_list, use_promote)
    rules = CastRules(policy, use_fp16_guard, lists.custom_black_varnames)
    program.cast(rules)
    if not rules.is_on:
        return set()
    kept, names = {id(p) for p in _used_in_float32(program, rules)}, program.calls.parameter_names()
    return {names[id(p)] for p in program.parameters() if p.is_floating_point() and id(p) not in kept}


def cast_parameters_to_fp16(
    place: str | torch.device | None,
    program: Program,
    scope: Any = None,
    to_fp16_var_names: Iterable[str] | None = None,
    rewrite_master_weight: bool = False,
    master_weights: Any = None,
) -> None:
    """Store the weights of a program in half, after `cast_model_to_fp16`; float32 masters are kept.

    Norm layers stay float32, as `mezzo.amp.decorate` leaves them.

    Args:
        place: As for `Executor`; None leaves the weights where they are.
        program: Cast by `cast_model_to_fp16`.
        scope: Accepted without effect; parameters belong to modules.
        to_fp16_var_names: Only these parameters; None: all that half operators use.
        rewrite_master_weight: Accepted without effect: masters always hold the float32 weights.
        master_weights: Accepted without effect, for the same reason.

    Raises:
        ProgramError: The program is not cast, it is closed by `minimize`, or a name is not in it.
        TypeError: `to_fp16_var_names` is one string.
    """
    policy = program.precision.policy
    if policy is None or not program.precision.is_on:
        raise ProgramError("the program is float32: call cast_model_to_fp16(program) before cast_parameters_to_fp16")
    if program.training is not None:
        raise ProgramError("the program trains: optimizer.amp_init(place) stores its weights in half")
    kept = _used_in_float32(program, program.precision)
    if to_fp16_var_names is not None:
        names = program.calls.parameter_names()
        wanted = _known_names(to_fp16_var_names, names.values())
        kept += [p for p in program.parameters() if names[id(p)] not in wanted]
    if place is not None:
        program.to(Executor(place).device)
    decorate_model(
        program.calls.root, level=policy.level, dtype=policy.dtype, fp8=policy.fp8,
        excluded_layers=program.calls.constants, excluded_parameters=kept,
    )  # fmt: skip


def _known_names(wanted: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the wanted names as a set.

    Raises:
        TypeError: It is one string.
        ProgramError: The program has no parameter of a name.
    """
    if isinstance(wanted, str):
        raise TypeError(f"to_fp16_var_names={wanted!r}: give a list of names")
    chosen, known = set(wanted), sorted(names)
    if unknown := sorted(chosen.difference(known)):
        raise ProgramError(
            f"to_fp16_var_names: no parameter is named {unknown[0]!r}; the program has {', '.join(known[:5])}"
        )
    return chosen
