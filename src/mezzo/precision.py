"""`Precision`: level, dtype, lists, loss scaler and FP8 recipe of a training run in one object.

Every training step of mezzo goes through it: the training command, `Model`, graph mode, the doctor,
bisection, accuracy comparison and the benchmarks (except their stock side). It is written with
`auto_cast`, `decorate` and `GradScaler`, which stay public for users who come from torch.amp or Paddle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.amp import (
    Excluded,
    Explanation,
    Fp8Recipe,
    FusedPart,
    GradScaler,
    Policy,
    auto_cast,
    check_optimizer_state,
    decorate,
    exclude_layers,
    explain,
    find_excluded,
    first_and_last,
    fp8_scales,
    fp8_weights,
    fuse_parts,
    half_parameters,
    is_sharded,
    keep_in_half,
    keep_optimizer_state,
    load_fp8_scales,
    load_lists,
    note_optimizer,
    parse_master_weight,
    parse_optimizer_state,
    refuse_gathering_in_fp8,
    refuse_old_parameters,
    refuse_other_fp8,
    refuse_other_fp8_gathering,
    refuse_other_gathering,
    refuse_unshardable,
    refuse_unsharded_options,
    resolve_name,
    set_optimizer_state,
    shard_model,
)
from mezzo.amp.support import refuse_other_devices
from mezzo.amp.user_lines import level_of_user
from mezzo.dtypes import HALF_DTYPES, dtype_name
from mezzo.fp8 import refuse_without_fp8
from mezzo.record import OperatorStats, collect_operator_stats

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from mezzo.static import CompiledStep

__all__ = ["Precision"]

M = TypeVar("M", bound=nn.Module)
Optimizers = TypeVar("Optimizers", Optimizer, Sequence[Optimizer])
Layers = Excluded | Sequence[Excluded]

_FP8_SCALES = "fp8_scales"
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Precision:
    """The precision of one training run: prepares a model, and takes the steps.

    Args:
        level: `O0` is float32. `OD` computes only white-listed operators in half, `O1` decides by
            lists, `O2` computes everything in half except the black list and normalisation, `O3` is
            O2 with large matrix products in FP8.
        dtype: `float16` or `bfloat16`.
        custom_white_list: Operators to compute in half in addition to the defaults.
        custom_black_list: Operators to compute in float32 in addition to the defaults.
        use_promote: See `amp.auto_cast`.
        fp8: O3: an `Fp8Recipe`, or a mapping of its settings.
        policy: A ready `amp.Policy`, instead of level, dtype, lists, `use_promote` and `fp8`.
        lists: A list file (`amp.read_lists`). Where it contradicts the custom lists, the file decides.
        excluded_layers: Modules, module types or name globs that stay in float32. At O0 these and the
            lists have no effect: everything is float32.
        half_layers: O3: modules, module types or name globs whose products stay in half. None: the
            first and the last layer; `()`: none. Those of the list file are added.
        half_weights: False leaves the weights float32 at O1, and every step casts them, as with
            torch.amp. By default O1, O2 and O3 keep half weights with float32 masters.
        master_weight: See `amp.decorate`.
        optimizer_state: `bfloat16` halves the moments of SGD, Adam and AdamW, and rounds them stochastically, at every
            level. None: float32.
        scaler: The loss scaler. None: a `GradScaler()` for float16, no scaling otherwise. With
            `GradScaler(enable=False)`, small float16 gradients become zero.

    Raises:
        ValueError: A value is unknown, a list names an unknown operator, or two arguments contradict
            each other.
        TypeError: `policy`, `scaler` or a list is of another type.

    >>> precision = Precision("O2", dtype="bfloat16")
    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with precision.autocast():
    ...     loss = model(torch.ones(8, 4)).square().mean()
    >>> precision.backward(loss)
    >>> norm = precision.step(optimizer, max_norm=1.0)
    >>> optimizer.zero_grad()
    >>> precision, model.weight.dtype, loss.dtype
    (Precision('O2', 'bfloat16'), torch.bfloat16, torch.float32)
    """

    def __init__(
        self,
        level: str = "O1",
        dtype: str | torch.dtype = "float16",
        *,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        use_promote: bool | None = None,
        fp8: Fp8Recipe | Mapping[str, Any] | None = None,
        policy: Policy | None = None,
        lists: str | Path | None = None,
        excluded_layers: Layers | None = None,
        half_layers: Layers | None = None,
        half_weights: bool | None = None,
        master_weight: bool | Literal["compact"] | None = None,
        optimizer_state: str | torch.dtype | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        _check_types(custom_white_list, custom_black_list, policy, scaler)
        self._lists = None if lists is None else Path(lists)
        named = {} if lists is None else load_lists(lists)
        white, black = _merge(named, custom_white_list, custom_black_list)
        given = (*white, *black, level != "O1", dtype != "float16", use_promote is not None, fp8 is not None)
        is_own_policy = policy is not None
        if policy is None:
            promotes = True if use_promote is None else use_promote
            policy = Policy.create(level, dtype, white or None, black or None, promotes, fp8=fp8)
        elif any(given):
            raise ValueError("policy: give it instead of level, dtype, lists, use_promote and fp8, not with them")
        self.level: str = policy.level
        self.policy: Policy | None = None if self.level == "O0" else policy
        """Decides the dtype of every operator; None at O0."""
        self.excluded_layers: Sequence[Excluded] = (*named.get("excluded_layers", ()), *_as_sequence(excluded_layers))
        self._named_half_layers: Sequence[str] = named.get("half_layers", ())
        self._half_layers = None if half_layers is None else _as_sequence(half_layers)
        self._half_weights = self._check_levels(half_layers, half_weights)
        parse_master_weight(master_weight)  # refuses what it does not know
        self.master_weight = master_weight
        """Which masters half weights get; see `amp.decorate`."""
        self.optimizer_state = parse_optimizer_state(optimizer_state)
        """Dtype of the optimizer's state: bfloat16, float32, or None for float32."""
        is_scaled = self.level != "O0" and policy.dtype is torch.float16
        self._scaler = GradScaler(enable=is_scaled) if scaler is None else scaler
        self.scaler: GradScaler | None = self._scaler if self._scaler.is_enable() else None
        """The loss scaler; None if the loss is not scaled."""
        self._region = auto_cast(enable=False) if self.policy is None else auto_cast(policy=policy)
        self.fused: Sequence[FusedPart] = ()
        """What `prepare(fuse=True)` replaced: path, class and replacement of each part."""
        self._half_share: float | None = None
        self._model: nn.Module | None = None
        """The model whose delayed FP8 scales belong to the state; None without such scales."""
        self._awaits_step: bool | None = None
        """True after `backward`, False after its step; None while the user scales losses by hand."""
        self._warns_without_half_weights = self.level in ("O2", "O3") and not is_own_policy
        """Whether the first step looks at the weights, because `prepare` was not called. Static programs give a
        policy and prepare their weights themselves."""

    def _check_levels(self, half_layers: Layers | None, half_weights: bool | None) -> bool:
        """Refuse options of other levels; return whether the weights become half."""
        if half_weights not in (None, True, False):
            raise TypeError(f"half_weights={half_weights!r}: must be True, False or None")
        if self.level != "O3" and self._named_half_layers:
            raise ValueError(f"{self._lists}: half_layers with level {self.level}: they belong to level O3")
        if self.level != "O3" and half_layers is not None:
            raise ValueError(f"half_layers with level={self.level!r}: it belongs to level O3")
        if half_weights is False and self.level in ("O2", "O3"):
            raise ValueError(f"half_weights=False with level={self.level!r}: O2 and O3 need half weights; use O1")
        if half_weights and self.level in ("O0", "OD"):
            raise ValueError(f"half_weights=True with level={self.level!r}: its weights stay float32; use O1 or O2")
        return self.level in ("O1", "O2", "O3") if half_weights is None else half_weights

    @property
    def dtype(self) -> torch.dtype:
        """The half dtype; float32 at O0."""
        return torch.float32 if self.policy is None else self.policy.dtype

    @property
    def name(self) -> str:
        """A short name for logs.

        >>> Precision("O2").name, Precision("O0").name
        ('fp16 O2', 'fp32')
        """
        return "fp32" if self.policy is None else f"{_SHORT[self.policy.dtype]} {self.level}"

    def __repr__(self) -> str:
        shown = repr(self.level) if self.policy is None else f"{self.level!r}, {dtype_name(self.dtype)!r}"
        return f"Precision({shown})"

    # Before training

    @overload
    def prepare(self, model: M, *, fuse: bool = False) -> M: ...
    @overload
    def prepare(self, model: M, optimizer: Optimizers, *, fuse: bool = False) -> tuple[M, Optimizers]: ...
    @overload
    def prepare(self, model: M, optimizer: Optimizer | None, *, fuse: bool = False) -> Any: ...
    def prepare(self, model: Any, optimizer: Any = None, *, fuse: bool = False) -> Any:
        """Make a model and its optimizer(s) ready to train, in place; return them.

        Call it before DDP wraps the model, and after `shard`. Several networks: give them as one
        `nn.ModuleList`, and their optimizers as a list.

        Args:
            model: The model, on its device.
            optimizer: Its optimizer, or a list of them; None: the model is prepared by itself.
            fuse: Also replace what transformers and others write out by hand (GELU, RMS norm, the
                causal loss) by one fused operator each, and pad the products of large linear layers
                with an odd number of outputs; `fused` lists what was replaced. Parameters and
                state_dict keys stay. Excluded layers stay as they are. Hooks of a replaced
                module are lost: register them afterwards.

        Raises:
            TypeError: `model` is not a module, or `optimizer` is not an optimizer.
            ValueError: `excluded_layers` or `half_layers` match no module, the model is on a device other than
                CPU and CUDA and the level is not O0, O3 would quantise layers of torchao or Transformer
                Engine twice, or the optimizer cannot have bfloat16 state.
            RuntimeError: The model is wrapped by DDP already, its shards are gathered in another dtype than the
                level asks for, the optimizer was created before the model was sharded, or the device cannot
                compute what O3 asks for.
        """
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise TypeError(f"prepare(): model must be an nn.Module (several: one nn.ModuleList), not {kind}")
        _check_optimizers(optimizer)
        if fuse not in (True, False):
            raise TypeError(f"prepare(): fuse={fuse!r}: must be True or False")
        if self.policy is not None:
            refuse_other_devices(model)
        self._refuse_other_fp8(model)
        optimizers = _as_optimizers(optimizer)
        check_optimizer_state(self.optimizer_state, parse_master_weight(self.master_weight), optimizers)
        if optimizer is not None and is_sharded(model):
            refuse_old_parameters(model, optimizer)
        if fuse and is_sharded(model):
            raise ValueError("prepare(fuse=True) of a sharded model: use precision.shard(model, fuse=True)")
        if fuse:
            spared = self._find(model, self.excluded_layers, "excluded_layers") if self.policy is not None else []
            self.fused = fuse_parts(model, spared)
        if self.policy is not None:
            self._convert(model, optimizer)
        if self.optimizer_state is not None:
            set_optimizer_state(optimizers, self.optimizer_state)
        self._model = model if self._is_delayed else None
        self._warns_without_half_weights = False
        self._scaler.name_parameters(model)
        if self.scaler is not None:
            self.scaler.protect_batch_norm(model)
        if optimizer is None:
            return model
        note_optimizer(model)
        return model, optimizer

    def _refuse_other_fp8(self, model: nn.Module) -> None:
        if self.level == "O3":
            excluded = self._find(model, self.excluded_layers, "excluded_layers")
            refuse_other_fp8(model, [*excluded, *self._find_half_layers(model)])

    def _convert(self, model: nn.Module, optimizer: Any) -> None:
        """Exclude layers, and make the other weights half where the level does."""
        excluded = self._find(model, self.excluded_layers, "excluded_layers")
        if is_sharded(model):
            self._convert_sharded(model, excluded)
        elif self._half_weights:
            decorate(
                model,
                [] if optimizer is None else optimizer,
                level=self.level,
                dtype=self.dtype,
                master_weight=self.master_weight,
                excluded_layers=excluded,
                **self._fp8_options(model),
            )
        else:
            exclude_layers(model, excluded)

    def _convert_sharded(self, model: nn.Module, excluded: list[nn.Module]) -> None:
        """Check a model that `fully_shard` sharded, and mark its layers: its float32 shards are the masters."""
        refuse_unsharded_options(self.master_weight, self._is_delayed)
        if self._half_weights:
            refuse_other_gathering(model, self.level, self.dtype, excluded)
        refuse_other_fp8_gathering(model, self._find_fp8_weights(model, excluded))
        in_half = self._fp8_options(model).get("half_layers", ())
        exclude_layers(model, excluded)
        keep_in_half(model, in_half)

    def shard(
        self,
        model: M,
        *,
        mesh: DeviceMesh | None = None,
        blocks: Layers | None = None,
        reshard_after_forward: bool = True,
        fuse: bool = False,
        gather_fp8: bool = False,
    ) -> M:
        """Shard a float32 model over the processes with FSDP2, in place; return it.

        Each process keeps a part of every float32 weight, of its gradient and of the optimizer's state. These
        shards are the masters. FSDP gathers a layer's weights when it computes, in the dtype that `prepare`
        would give them. The parameters are new: create the optimizer afterwards, then call `prepare`.

        Args:
            model: The model, on its device, with the same weights in all processes.
            mesh: The processes (`init_device_mesh`); None: all of them.
            blocks: Modules, module types or name globs to gather one at a time, such as the layers of a
                transformer (`"layers.*"`). None: all modules of a million parameters or more. Modules that
                share a weight with others are gathered with the module around all of them.
            reshard_after_forward: Free gathered weights after the forward pass; False keeps them until the
                backward pass, which needs memory and saves a second all-gather.
            fuse: As in `prepare`, which cannot replace parts of a sharded model.
            gather_fp8: O3: gather the weights of FP8 layers in FP8, one byte per number instead of two. FP8
                products have the same numbers bit for bit. A call of such a layer that is not FP8, because it
                has too few rows, uses the FP8 numbers of the weight and warns once.

        Raises:
            TypeError: `model` is not a module, or `gather_fp8` is neither True nor False.
            RuntimeError: The model is sharded, wrapped (DDP, FSDP1), decorated or prepared with an optimizer already.
            ValueError: `blocks` or `excluded_layers` match no module, a weight is not float32 or has no
                dimension, layers in half and in float32 share a weight, or `gather_fp8` is given with
                another level, scales per row, delayed scaling or a number for `reshard_after_forward`.
                No weight is sharded then.
        """
        refuse_unshardable(model)
        if gather_fp8 not in (True, False):
            raise TypeError(f"shard(): gather_fp8={gather_fp8!r}: must be True or False")
        if gather_fp8:
            refuse_gathering_in_fp8(None if self.policy is None else self.policy.fp8, reshard_after_forward)
        excluded = self._find(model, self.excluded_layers, "excluded_layers") if self.policy is not None else []
        if fuse:
            self.fused = fuse_parts(model, excluded)
        in_fp8 = self._find_fp8_weights(model, excluded) if gather_fp8 else []
        if gather_fp8 and not in_fp8:
            warnings.warn(
                "shard(gather_fp8=True): the model has no FP8 layer, so all weights are gathered in half; "
                "print(precision.explain(model)) gives the reasons",
                UserWarning,
                stacklevel=2,
            )
        shard_model(
            model,
            self.level if self._half_weights else None,
            self.dtype,
            excluded,
            mesh=mesh,
            blocks=None if blocks is None else self._find(model, _as_sequence(blocks), "blocks"),
            reshard_after_forward=reshard_after_forward,
            in_fp8=in_fp8,
        )
        return model

    def _find_fp8_weights(self, model: nn.Module, excluded: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Return the weights that may be gathered in FP8."""
        if self.level != "O3":
            return []
        assert self.policy is not None
        return fp8_weights(model, self.policy, [*excluded, *self._find_half_layers(model)])

    def weight_dtypes(self, model: nn.Module) -> dict[str, torch.dtype]:
        """Return the dtype that `prepare` would give each parameter, by name; nothing changes."""
        in_half: set[int] = set()
        if self.policy is not None and self._half_weights:
            excluded = self._find(model, self.excluded_layers, "excluded_layers")
            in_half = half_parameters(model, self.level, self.dtype, excluded)
        return {
            name: self.dtype if id(param) in in_half and param.dtype is torch.float32 else param.dtype
            for name, param in model.named_parameters()
        }

    def prepare_for_evaluation(self, model: nn.Module) -> None:
        """Mark the layers that stay in float32, and O3's half layers, in place; weights do not change."""
        if self.policy is None:
            return
        self._refuse_other_fp8(model)
        in_half = self._find_half_layers(model) if self.level == "O3" else []
        exclude_layers(model, self._find(model, self.excluded_layers, "excluded_layers"))
        keep_in_half(model, in_half)

    def _fp8_options(self, model: nn.Module) -> dict[str, Any]:
        """Return what `decorate` needs besides at O3."""
        if self.level != "O3":
            return {}
        assert self.policy is not None
        recipe = Fp8Recipe.of(self.policy.fp8)
        for device in {param.device for param in model.parameters()}:
            refuse_without_fp8(device, recipe.emulate)
        return {"half_layers": self._find_half_layers(model), "fp8": recipe}

    def _find_half_layers(self, model: nn.Module) -> list[nn.Module]:
        own = (
            first_and_last(model) if self._half_layers is None else self._find(model, self._half_layers, "half_layers")
        )
        return [*own, *self._find(model, self._named_half_layers, "half_layers")]

    def _find(self, model: nn.Module, names: Sequence[Excluded], argument: str) -> list[nn.Module]:
        try:
            return find_excluded(model, names, argument)
        except ValueError as error:
            raise ValueError(f"{self._lists}: {error}" if self._lists else str(error)) from error

    # A training step

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the region for the forward pass and the loss."""
        return self._region

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute the gradients of the scaled loss.

        Args:
            loss: The unscaled loss; a float32 number if it was computed inside `autocast()`.
            options: Passed on to `Tensor.backward`, such as `retain_graph`.
        """
        self._scaler.scale(loss).backward(**options)
        self._awaits_step = True

    def step(self, *optimizers: Optimizer, max_norm: float | None = None) -> Tensor | None:
        """Check the gradients, unscale and clip them, update the weights, and adapt the loss scale.

        With a loss scale, an optimizer whose gradients are not finite changes nothing, and the scale
        may fall. The device decides; the host does not wait for it. Without one (bfloat16, float32)
        gradients are not checked, as with a plain `optimizer.step()`.

        Args:
            optimizers: One optimizer, or all whose gradients come from the same backward passes.
            max_norm: Clip the norm of the true gradients to this, for each optimizer.

        Returns:
            The norm before clipping, on the device; None without `max_norm`. With several
            optimizers: the norm over all of them.

        Raises:
            RuntimeError: The loss scale changed after the backward pass that made these gradients.
        """
        if not optimizers:
            raise TypeError("step() needs the optimizer: precision.step(optimizer)")
        if self._awaits_step is False and self.scaler is not None:
            self._refuse_old_scale(optimizers)
        if self._warns_without_half_weights:
            self._warn_without_half_weights(optimizers)
        self._keep_state(*optimizers)
        norms = []
        if max_norm is not None:
            norms = [self._scaler.clip_grad_norm_(optimizer, max_norm) for optimizer in optimizers]
        for optimizer in optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        self._awaits_step = None if self._awaits_step is None else False
        if len(norms) > 1:
            total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
            return total
        return norms[0] if norms else None

    def _refuse_old_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise RuntimeError if an optimizer has gradients, all of which come from before the last update."""
        for optimizer in optimizers:
            if any(param.grad is not None for group in optimizer.param_groups for param in group["params"]):
                raise RuntimeError(
                    "step() was called twice after one backward(): the first call changed the loss scale that these "
                    "gradients carry. Step all optimizers in one call: precision.step(optimizer_a, optimizer_b)"
                )

    def _warn_without_half_weights(self, optimizers: Sequence[Optimizer]) -> None:
        """Warn once if this object did not prepare the model and no other call made its weights half."""
        self._warns_without_half_weights = False
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        if not any(param.dtype in HALF_DTYPES for group in groups for param in group["params"]):
            warnings.warn(
                f"level {self.level} trains float32 weights: this Precision did not prepare the model. Call "
                "precision.prepare(model, optimizer) before the loop",
                UserWarning,
                stacklevel=level_of_user(),
            )

    def _keep_state(self, *optimizers: Optimizer) -> None:
        if self.optimizer_state is not None:
            keep_optimizer_state(optimizers, self.optimizer_state)

    def train_step(
        self,
        forward: Callable[[], tuple[Any, Tensor]],
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        update: bool = True,
    ) -> tuple[Any, Tensor]:
        """Run one whole training step; return the outputs and the detached loss.

        Args:
            forward: Returns the model's outputs and the loss; runs inside `autocast()`.
            optimizer: Its gradients are freed after the update.
            max_norm: Clip the norm of the true gradients to this.
            update: False only accumulates gradients; the next step adds to them.
        """
        with self._region:
            result = forward()
        if isinstance(result, Tensor):
            raise TypeError("train_step(): forward() must return the outputs and the loss, not one tensor")
        outputs, loss = result
        self.backward(loss)
        if update:
            self.step(optimizer, max_norm=max_norm)
            optimizer.zero_grad(set_to_none=True)
        return outputs, loss.detach()

    def compile(
        self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer, **options: Any
    ) -> CompiledStep:
        """Return the whole training step as one captured program; call it with a batch.

        Args:
            model: Prepared by this object.
            loss_fn: Gets the model's output and the target; returns the loss, or a tuple that starts with it.
            optimizer: The optimizer that was prepared with the model.
            options: `max_norm`, `backend`, `accumulate`, `ema`, `process_group`, `saves_memory` and others:
                see `static.compile_step`.
        """
        from mezzo.static import compile_step  # the one import of a higher layer: see tests/test_layers.py

        if self._warns_without_half_weights:
            self._warn_without_half_weights([optimizer])
        self._keep_state(optimizer)
        return compile_step(model, loss_fn, optimizer, precision=self, **options)

    # What it does, and what a checkpoint keeps

    def explain(self, target: str | nn.Module | Callable[..., Any]) -> Explanation:
        """Tell which list or rule decides the dtype of an operator, or of every layer of a model."""
        return explain(target, self.policy or Policy.create("O0"))

    @contextmanager
    def record(self) -> Iterator[OperatorStats]:
        """Count which operators run in which dtype; the context's value has `table()` and `half_share`.

        Recording slows a step down: record one step, and `numbers` keeps its share of half operators.
        """
        with collect_operator_stats(print_table=False) as stats:
            yield stats
        self._half_share = stats.half_share

    def numbers(self, *, wait: bool = False) -> dict[str, float]:
        """Return plain numbers for a logger: wandb, TensorBoard, MLflow, Lightning's `log_dict`.

        Args:
            wait: Wait for the device, so that the last step counts. By default the host does not
                wait, and on CUDA the numbers may be some steps old.

        Returns:
            `precision/loss_scale` and `precision/skipped_steps` if the loss is scaled, and
            `precision/half_share`, the share of half operators, if a step was recorded (`record`).

        >>> Precision("O2").numbers()
        {'precision/loss_scale': 32768.0, 'precision/skipped_steps': 0.0}
        """
        numbers: dict[str, float] = {}
        if self.scaler is not None:
            if wait:
                self.scaler.flush()
            numbers["precision/loss_scale"] = self.scaler.known_scale
            numbers["precision/skipped_steps"] = float(self.scaler.skipped_steps)
        if self._half_share is not None:
            numbers["precision/half_share"] = self._half_share
        return numbers

    @property
    def _is_delayed(self) -> bool:
        return self.policy is not None and self.policy.fp8 is not None and self.policy.fp8.scaling == "delayed"

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale with its counters, and the history of delayed FP8 scales."""
        state = self._scaler.state_dict()
        if self._model is not None:
            state[_FP8_SCALES] = fp8_scales(self._model)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; one without a loss scale (float32, bfloat16) leaves the first scale.

        Raises:
            ValueError: The loss scale is not valid, or the FP8 scales belong to another model.
                Nothing has changed then.
            RuntimeError: There are FP8 scales, but `prepare` has not been called yet.
        """
        state = dict(state)
        scales = state.pop(_FP8_SCALES, {})
        if scales and self._is_delayed and self._model is None:
            raise RuntimeError("load_state_dict() before prepare(): the FP8 scales belong to a model; prepare it first")
        loads_scale = bool(state) and self.scaler is not None
        if loads_scale:
            GradScaler().load_state_dict(state)  # finds errors before the FP8 scales change
        if self._model is not None:
            load_fp8_scales(self._model, scales)
        if loads_scale:
            self._scaler.load_state_dict(state)


def _check_types(white: object, black: object, policy: object, scaler: object) -> None:
    """Raise TypeError for an argument that would fail later, or in words that do not name it."""
    for argument, names in (("custom_white_list", white), ("custom_black_list", black)):
        if isinstance(names, str):
            raise TypeError(f"{argument}={names!r}: must be a list of operator names; use [{names!r}]")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy={policy!r}: must be a mezzo.amp.Policy")
    if scaler is not None and not isinstance(scaler, GradScaler):
        kind = type(scaler)
        raise TypeError(f"scaler: must be a mezzo.amp.GradScaler, not {kind.__module__}.{kind.__qualname__}")


def _as_optimizers(optimizers: Any) -> list[Any]:
    is_list = isinstance(optimizers, Sequence) and not isinstance(optimizers, str)
    return [] if optimizers is None else list(optimizers) if is_list else [optimizers]


def _check_optimizers(optimizers: object) -> None:
    """Raise TypeError unless all are optimizers: objects with `param_groups`, as apex's LARC has too."""
    for each in _as_optimizers(optimizers):
        if each is not None and (isinstance(each, type) or not hasattr(each, "param_groups")):
            name = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
            raise TypeError(f"prepare(): optimizer must be an optimizer or a list of them, not {name}")


def _as_sequence(layers: Layers | None) -> tuple[Excluded, ...]:
    if isinstance(layers, (nn.Module, type, str)):
        return (layers,)
    if layers is None:
        return ()
    return tuple(layers) if isinstance(layers, Iterable) else (layers,)  # find_excluded() refuses the latter


def _merge(
    named: Mapping[str, Sequence[str]], white: Iterable[str] | None, black: Iterable[str] | None
) -> tuple[list[str], list[str]]:
    """Return the white and the black list: the file's, and of the given ones what the file does not contradict."""
    file_white, file_black = named.get("custom_white_list", ()), named.get("custom_black_list", ())
    if not (file_white or file_black):
        return list(white or ()), list(black or ())
    return [*_without(white, file_black), *file_white], [*_without(black, file_white), *file_black]


def _without(names: Iterable[str] | None, others: Iterable[str]) -> list[str]:
    return sorted(_operators(names or ()) - _operators(others))


def _operators(names: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*map(resolve_name, names))
