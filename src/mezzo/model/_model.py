"""The high-level API: `Model` trains, evaluates, runs and saves a network by one call each."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo._arguments import check_at_least
from mezzo._torch.data_loaders import translate_worker_errors
from mezzo.amp import GradScaler
from mezzo.dtypes import HALF_DTYPES
from mezzo.files import folder_lock, say
from mezzo.model._amp_configs import make_precision_of
from mezzo.model._data import as_list, as_tensors, begin_epoch, count_inputs, count_samples, length_of, make_loader
from mezzo.model._files import export_forward, load_training, save_training
from mezzo.model._prepared import Loss, Prepared
from mezzo.model._runs import Epoch, run_evaluation
from mezzo.model.callbacks import Callback, CallbackList, ModelCheckpoint, ProgBarLogger
from mezzo.model.metric import Metric
from mezzo.model.parallel import decide_first, enter_world, share_buffers, share_state, wrap
from mezzo.model.summary import layer_table, parameter_counts
from mezzo.precision import Precision
from mezzo.record import operator_log
from mezzo.static import CompiledStep, InputSpec

Callbacks = Callback | Sequence[Callback] | None
_prepared_as: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""The precision of each network's weights; a second Model of the same network checks it."""


class Model:
    """A network that trains, evaluates and predicts by one call each, in mixed precision if asked.

    Under `torchrun` every process creates its own Model. The processes share the data sets, average
    the gradients and add up the metrics.

    Args:
        network: Moved to the device, in place.
        inputs: One `InputSpec` per argument of forward. Their number is the number of tensors of a
            batch that are inputs; an exported file takes these inputs. None: one input per argument
            of forward without a default, with the shapes of the first batch.
        device: `auto` (the GPU if there is one), `cpu`, `gpu` or `gpu:1`.

    >>> model = Model(nn.Linear(4, 2), device="cpu")
    >>> model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), amp_configs="O1")
    >>> losses = [model.train_batch(torch.ones(3, 4), torch.tensor([0, 1, 1]))[0] for _ in range(2)]
    >>> losses[1] < losses[0]
    True
    """

    def __init__(
        self, network: nn.Module, inputs: InputSpec | Sequence[InputSpec] | None = None, device: str = "auto"
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network is a {type(network).__name__}: must be a torch.nn.Module")
        self.world = enter_world(device, setting="device={!r}", leave_at_exit=True)
        self.network = network.to(self.world.device)
        self.stop_training = False
        """A callback sets it to True to end training after the current epoch."""
        self._inputs = None if inputs is None else [_check_spec(spec) for spec in as_list(inputs)]
        num_inputs = count_inputs(network) if self._inputs is None else len(self._inputs)
        is_double = any(param.dtype is torch.float64 for param in network.parameters())
        self._prepared = Prepared(
            self.world, self.network, self.network, num_inputs, Precision("O0"), is_double=is_double
        )
        self._is_in_epoch = False

    # Parts of the model

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the network, for an optimizer."""
        return list(self.network.parameters())

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that `prepare` received; None before that."""
        return self._prepared.optimizer

    @property
    def has_updated(self) -> bool:
        """Whether the last training batch updated the weights; False if it only added gradients."""
        return self._prepared.has_updated

    @property
    def precision(self) -> Precision:
        """The precision of `amp_configs`."""
        return self._prepared.precision

    @property
    def compiled_step(self) -> CompiledStep | None:
        """The captured training step; None without `graph=True`."""
        return self._prepared.compiled

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler; None without float16."""
        return self._prepared.precision.scaler

    def summary(self, input_size: Sequence[int] | None = None, dtype: str | torch.dtype = "float32") -> dict[str, int]:
        """Print the layers with output shapes and parameters; return the parameter counts.

        Args:
            input_size: Shape of the only input, batch first. None: the shapes of `inputs`,
                otherwise those of the first batch; before any batch the table has no shapes.
            dtype: Dtype of that input.
        """
        inputs = self._prepared.sample
        if input_size is not None:
            spec = InputSpec(input_size, dtype)
            inputs = [_zeros(spec, self.world.device)]
        elif self._inputs is not None:
            inputs = [_zeros(spec, self.world.device) for spec in self._inputs]
        with operator_log.paused(), self._prepared.precision.autocast():
            text = layer_table(self.network, inputs)
        if self.world.is_first:
            say(text)
        return parameter_counts(self.network)

    def prepare(
        self,
        optimizer: Optimizer | None = None,
        loss: Loss | None = None,
        metrics: Metric | Sequence[Metric] | None = None,
        amp_configs: str | Mapping[str, Any] | None = None,
        *,
        max_norm: float | None = None,
        graph: bool = False,
    ) -> None:
        """Set optimizer, loss, metrics and precision; check all arguments before any change.

        Args:
            optimizer: Optimizer of `model.parameters()`. None: the model only evaluates and
                predicts.
            loss: Called with the network's outputs, then the labels. It returns one number, or
                several, which are added up.
            metrics: From `mezzo.model.metric`.
            amp_configs: None: float32. 'O1', 'O2', 'O3', or a dict: `level`, `dtype` (float16,
                bfloat16), `init_loss_scaling`, `incr_ratio`, `decr_ratio`, `incr_every_n_steps`,
                `decr_every_n_nan_or_inf`, `use_dynamic_loss_scaling`, `custom_white_list`,
                `custom_black_list`, `fp8` (a dict).
            max_norm: Largest norm of the gradients; larger ones are clipped.
            graph: Train in graph mode: the whole step is captured and, where that is faster,
                compiled at the first batch (`mezzo.static.compile_step`). Gradients cannot be
                accumulated over batches then. `compiled_step.report()` tells which form runs.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `amp_configs` is not valid, `max_norm` is negative, two metrics have the
                same name, or the optimizer has no parameter of the network.
            RuntimeError: The network already has half weights of another precision, or the device
                does not support FP8 matrix products.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: must be a torch.optim.Optimizer")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss is a {type(loss).__name__}: must be a torch.nn.Module or a function")
        chosen = [] if metrics is None else as_list(metrics)
        for metric in chosen:
            if not isinstance(metric, Metric):
                raise TypeError(f"metrics: a {type(metric).__name__} must be a mezzo.model.metric.Metric")
        if max_norm is not None and not max_norm >= 0:
            raise ValueError(f"max_norm={max_norm!r}: must be 0 or more")
        self._refuse_what_does_not_fit(optimizer, chosen)
        precision = make_precision_of(amp_configs)
        before = _prepared_as.get(self.network, "fp32")
        if before not in ("fp32", precision.name):
            raise RuntimeError(
                f"the network's weights are in {before}, but amp_configs asks for {precision.name}: prepare a Model of "
                "another network, such as amp.float32_copy(model.network)"
            )
        if not isinstance(graph, bool):
            raise TypeError(f"graph={graph!r}: must be True or False")
        if graph and (optimizer is None or loss is None):
            raise ValueError("graph=True captures a training step: give an optimizer and a loss, too")
        share_state(self.network, self.world)
        precision.prepare(self.network, optimizer)
        _prepared_as[self.network] = precision.name
        if isinstance(loss, nn.Module):
            loss.to(self.world.device)
        is_plain = optimizer is None or graph  # a captured step averages the gradients itself
        wrapped = self.network if is_plain else wrap(self.network, self.world, is_shared=True)
        self._prepared = replace(
            self._prepared,
            wrapped=wrapped,
            precision=precision,
            optimizer=optimizer,
            loss=loss,
            metrics=chosen,
            max_norm=max_norm,
            is_double=any(param.dtype is torch.float64 for param in self.network.parameters()),
            compiled=None,
        )
        if graph:
            assert optimizer is not None
            prepared = self._prepared
            prepared.compiled = precision.compile(
                self.network,
                prepared.loss_module(),
                optimizer,
                max_norm=max_norm,
                num_inputs=prepared.num_inputs,
                process_group=self.world.group,
            )

    def _refuse_what_does_not_fit(self, optimizer: Optimizer | None, metrics: Sequence[Metric]) -> None:
        if optimizer is not None:
            own = {id(param) for param in self.network.parameters()}
            if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
                raise ValueError("the optimizer has no parameter of the network: create it with model.parameters()")
        names = ["loss", *(name for metric in metrics for name in as_list(metric.name()))]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"metrics: the name {twice[0]!r} occurs twice; rename one of them, as in Accuracy(name=...)"
            )

    # One batch

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """Train on one batch; return `[loss]`, or with metrics the pair `[loss], values`.

        Args:
            inputs: A tensor or array, or a list of them.
            labels: Same types as `inputs`.
            update: False: keep the gradients; the next call adds its own to them and updates.
        """
        prepared = self._prepared
        prepared.need("optimizer", "train_batch")
        prepared.need("loss", "train_batch")
        prepared.reset_metrics()
        result = prepared.train(self._as_batch(inputs, labels), update)
        return _with_metrics(prepared, result.loss)

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """Evaluate one batch; return the same as `train_batch`."""
        prepared = self._for_evaluation()
        if not prepared.metrics:
            prepared.need("loss", "eval_batch")
        prepared.reset_metrics()
        with prepared.evaluation():
            loss = prepared.measure(self._as_batch(inputs, labels))
        return _with_metrics(prepared, loss)

    def predict_batch(self, inputs: Any) -> list[np.ndarray[Any, Any]]:
        """Return the network's outputs for one batch, as arrays; half values become float32."""
        with self._prepared.evaluation():
            return [_as_array(output) for output in self._prepared.predict(self._as_tensors(inputs))]

    # Whole data sets

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        batch_size: int = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | Path | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: Callbacks = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
    ) -> list[dict[str, float]]:
        """Train; return loss and metrics per epoch; those of evaluations start with `eval_`.

        Args:
            train_data: A data set, a `DataLoader`, or an iterable of batches. A batch has the
                inputs first, then the labels. A list is a data set.
            eval_data: Same types as `train_data`; evaluated during training.
            batch_size: Samples per batch and process; only for a data set.
            epochs: Number of passes over the data.
            eval_freq: Epochs between two evaluations.
            log_freq: Batches between two printed lines.
            save_dir: Folder of the checkpoints: one every `save_freq` epochs, named after the
                epoch, and `final`.
            save_freq: Epochs between two checkpoints.
            verbose: 0: silent; 1: a bar; 2: lines.
            drop_last: Skip the last batch if it is smaller.
            shuffle: Shuffle the data set before every epoch.
            num_workers: Processes that read a data set.
            callbacks: Additional callbacks, see `mezzo.model.callbacks`.
            accumulate_grad_batches: Batches whose gradients are added up for one update. The sum is
                not divided by their number.
            num_iters: Maximum number of batches over all epochs.

        Raises:
            NonFiniteLoss: The loss became inf or nan, and no dynamic loss scale can correct it.
            FolderInUse: Another training is writing to `save_dir`.
            ValueError: `accumulate_grad_batches` with `graph=True`.
        """
        prepared = self._prepared
        optimizer: Optimizer = prepared.need("optimizer", "fit")
        prepared.need("loss", "fit")
        _check_counts(
            epochs=epochs, eval_freq=eval_freq, accumulate_grad_batches=accumulate_grad_batches, num_iters=num_iters
        )
        if accumulate_grad_batches > 1:
            prepared.refuse_accumulation()
        world = self.world
        loader = make_loader(
            train_data,
            world,
            batch_size=batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            drop_last=drop_last,
            share="even",
        )
        eval_loader = eval_data
        if eval_data is not None:
            eval_loader = make_loader(eval_data, world, batch_size=batch_size, num_workers=num_workers)
        told = self._tell(
            callbacks,
            [ProgBarLogger(log_freq, verbose), ModelCheckpoint(save_freq)],
            epochs=epochs,
            steps=length_of(loader, num_iters),
            evaluates=eval_data is not None,
            batch_size=batch_size,
            verbose=verbose,
            save_dir=None if save_dir is None else Path(save_dir),
        )
        history: list[dict[str, float]] = []
        self.stop_training, left = False, num_iters
        optimizer.zero_grad(set_to_none=True)
        with told.closing(), translate_worker_errors(), self._folders(save_dir, callbacks):
            told.begin("train")
            for number in range(epochs):
                begin_epoch(loader, number)
                self._is_in_epoch = True
                try:
                    logs = Epoch(prepared, told, accumulate_grad_batches, left).run(loader, number)
                finally:
                    self._is_in_epoch = False
                left = None if left is None else left - int(logs["step"])
                is_last = number == epochs - 1 or self.stop_training or left == 0
                if eval_loader is not None and ((number + 1) % eval_freq == 0 or is_last):
                    found = run_evaluation(prepared, eval_loader, told)
                    logs |= {f"eval_{name}": value for name, value in found.items() if name != "samples"}
                history.append(logs)
                if self.stop_training or left == 0:
                    break
            share_buffers(self.network, self.world)  # each process has seen its own batches
            told.end("train", history[-1])
        return history

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int = 0,
        callbacks: Callbacks = None,
        num_iters: int | None = None,
    ) -> dict[str, float]:
        """Return loss and metrics over a whole data set; several processes share the work.

        Args:
            eval_data: A data set, a `DataLoader`, or an iterable of batches.
            batch_size: Samples per batch; only for a data set.
            log_freq: As in `fit`.
            verbose: As in `fit`.
            num_workers: Processes that read a data set.
            callbacks: See `mezzo.model.callbacks`.
            num_iters: Maximum number of batches.
        """
        if self._prepared.loss is None and not self._prepared.metrics:
            raise RuntimeError("evaluate() needs a loss or metrics: call prepare(...) first")
        _check_counts(num_iters=num_iters)
        loader = make_loader(eval_data, self.world, batch_size=batch_size, num_workers=num_workers)
        told = self._tell(callbacks, [ProgBarLogger(log_freq, verbose)], batch_size=batch_size, verbose=verbose)
        with told.closing():
            return run_evaluation(self._for_evaluation(), loader, told, num_iters)

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: Callbacks = None,
    ) -> list[Any]:
        """Return one list per output of the network, with one array per batch.

        Every process predicts the whole data set.

        Args:
            test_data: A data set, a `DataLoader`, or an iterable of batches; labels are ignored.
            batch_size: Samples per batch; only for a data set.
            num_workers: Processes that read a data set.
            stack_outputs: Return one array per output, with all samples.
            verbose: As in `fit`.
            callbacks: See `mezzo.model.callbacks`.
        """
        loader = make_loader(test_data, self.world, batch_size=batch_size, num_workers=num_workers, share="none")
        told = self._tell(callbacks, [ProgBarLogger(1, verbose)], batch_size=batch_size, verbose=verbose)
        rows, samples = [], 0
        with told.closing():
            told.begin("predict", {"steps": length_of(loader)})
            for step, batch in enumerate(loader):
                told.begin_batch("predict", step)
                inputs, _ = self._prepared.split(batch)
                rows.append(self.predict_batch(inputs))
                samples += count_samples(inputs)
                told.end_batch("predict", step, {})
            told.end("predict", {"samples": samples})
        outputs = [list(column) for column in zip(*rows, strict=True)]
        return [np.concatenate(column) for column in outputs] if stack_outputs else outputs

    # Files

    def save(self, path: str | Path, training: bool = True) -> Path:
        """Write the model; return the path. All processes must call it; only the first writes.

        Args:
            path: With `training` a folder for the float32 weights, the optimizer and the loss
                scale. Otherwise a file; `.pt2` is appended if missing.
            training: False: export only forward, in float32 and evaluation mode, and compare the
                file's output with the network's.

        Raises:
            RunError: The network cannot be exported, or the system refuses to write.
            ValueError: The shapes of the inputs are unknown.
        """
        target = Path(path)
        if training:
            if self.world.is_first:
                save_training(target, self.network, self.optimizer, self._prepared.precision)
            self.world.barrier()
            return target
        inputs, sample = self._known_inputs()
        target = target if target.suffix == ".pt2" else target.with_name(f"{target.name}.pt2")
        if self.world.is_first:
            export_forward(target, self.network, inputs, sample)
        self.world.barrier()
        return target

    def _known_inputs(self) -> tuple[list[InputSpec], list[Tensor]]:
        """Return the specs of the inputs, and samples: from the first batch, or zeros."""
        seen = self._prepared.sample
        sample = None if seen is None else [tensor.cpu() for tensor in seen]
        if self._inputs is not None:
            if sample is None or not all(map(_fits, self._inputs, sample)):
                sample = [_zeros(spec, torch.device("cpu")) for spec in self._inputs]
            return self._inputs, sample
        if sample is None:
            raise ValueError(
                "save(training=False): the shapes of the inputs are unknown; use Model(network, "
                "inputs=[InputSpec(...)]), or train or predict a batch first"
            )
        wide = [tensor.float() if tensor.dtype in HALF_DTYPES else tensor for tensor in sample]
        return [InputSpec([None, *tensor.shape[1:]] if tensor.dim() else [], tensor.dtype) for tensor in wide], wide

    def load(self, path: str | Path, skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Load what `save` wrote, or a file of weights (`.safetensors`, `.pdparams`, `.pt`).

        Args:
            path: A folder, or a file.
            skip_mismatch: Load the weights that fit, and warn about the others.
            reset_optimizer: Do not load optimizer and loss scale.

        Raises:
            CheckpointError: There is nothing to load, or it does not fit.
        """
        load_training(
            Path(path),
            self.network,
            self.optimizer,
            self._prepared.precision,
            skip_mismatch=skip_mismatch,
            reset_optimizer=reset_optimizer,
        )

    # Helpers

    def _tell(self, callbacks: Callbacks, usual: list[Callback], **params: Any) -> CallbackList:
        numbers = ["loss", *self._prepared.metric_names()]
        known = {"epochs": 1, "steps": None, "save_dir": None, "evaluates": True, "metrics": numbers}
        given = [] if callbacks is None else as_list(callbacks)
        missing = [one for one in usual if not any(isinstance(other, type(one)) for other in given)]
        # The bar comes first. The checkpoint comes last: it saves what other callbacks changed.
        first = [one for one in missing if isinstance(one, ProgBarLogger)]
        return CallbackList([*first, *given, *(one for one in missing if one not in first)], self, {**known, **params})

    @contextmanager
    def _folders(self, save_dir: str | Path | None, callbacks: Callbacks) -> Iterator[None]:
        """Lock the folders that a training writes to; only the first process takes the locks."""
        given = [] if callbacks is None else as_list(callbacks)
        own = [callback.save_dir for callback in given if isinstance(callback, ModelCheckpoint)]
        folders = {Path(path).resolve() for path in (save_dir, *own) if path is not None}

        def take(locks: ExitStack) -> list[str]:
            found = [locks.enter_context(_lock(folder)) for folder in sorted(folders)]
            return [line for line in found if line is not None]

        with ExitStack() as locks:
            for line in decide_first(self.world, lambda: take(locks)) if folders else ():
                if self.world.is_first:
                    warnings.warn(line, UserWarning, stacklevel=4)
            yield

    def _for_evaluation(self) -> Prepared:
        """Return the prepared network; during an epoch with copies of the metrics in use."""
        if not self._is_in_epoch:
            return self._prepared
        return replace(self._prepared, metrics=copy.deepcopy(self._prepared.metrics))

    def _as_batch(self, inputs: Any, labels: Any) -> tuple[list[Tensor], list[Tensor]]:
        return self._as_tensors(inputs), self._as_tensors(labels)

    def _as_tensors(self, values: Any) -> list[Tensor]:
        return as_tensors(values, self.world.device, double=self._prepared.is_double)


def _lock(folder: Path) -> AbstractContextManager[str | None]:
    return folder_lock(folder, purpose="a training", advice="wait for it, or choose another save_dir")


def _with_metrics(prepared: Prepared, loss: Tensor | None) -> Any:
    values = [metric.accumulate() for metric in prepared.metrics]
    losses = [] if loss is None else [loss.item()]
    return (losses, values) if values else losses


def _as_array(output: Tensor) -> np.ndarray[Any, Any]:
    wide = output.float() if output.dtype in HALF_DTYPES else output
    array: np.ndarray[Any, Any] = wide.cpu().numpy()
    return array


def _zeros(spec: InputSpec, device: torch.device) -> Tensor:
    return torch.zeros([2 if size < 0 else size for size in spec.shape], dtype=spec.dtype, device=device)


def _fits(spec: InputSpec, tensor: Tensor) -> bool:
    return spec.fits(tensor.shape) and spec.dtype is tensor.dtype


def _check_spec(spec: Any) -> InputSpec:
    if not isinstance(spec, InputSpec):
        raise TypeError(f"inputs: a {type(spec).__name__} must be a mezzo.static.InputSpec")
    return spec


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        check_at_least(name, value)
