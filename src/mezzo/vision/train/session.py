"""The objects of a run, created once: model, optimizer, data, precision."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mezzo.amp import explain
from mezzo.checkpoint import LoadReport, WeightsError, find_weights, load_weights
from mezzo.errors import MezzoError, OptionError
from mezzo.fetch import is_url, place_of
from mezzo.fp8 import why_no_fp8
from mezzo.model.parallel import World, share_state, use_sync_batch_norm, wrap
from mezzo.model.precision import make_precision
from mezzo.model.sharded import shard
from mezzo.precision import Precision
from mezzo.static import to_static
from mezzo.vision.data import Loader, Prefetcher, Stream, ToInput
from mezzo.vision.options import RunOptions
from mezzo.vision.recipes import Recipe
from mezzo.vision.train._ema import Ema
from mezzo.vision.train._tasks import NetworkTask, make_task

SAVE_EVERY = 1000  # default for segmentation


class UnusableRecipe(MezzoError):
    """A recipe has no data or weights that the command needs."""


@dataclass(slots=True)
class Session:
    """The objects of a run."""

    recipe: Recipe
    options: RunOptions
    world: World
    model: nn.Module
    """The network without wrapper, which is saved and evaluated."""
    wrapped: nn.Module
    """The network that an eager step trains: wrapped by DDP if there are several processes."""
    optimizer: Optimizer
    precision: Precision
    task: NetworkTask
    stream: Stream
    loader: Loader
    to_input: ToInput
    ema: Ema | None
    notices: list[str]
    backend: str = "auto"
    """The backend of a compiled step; after its first call, or a resume, the one that was chosen."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of all processes in an epoch."""
        return self.stream.steps_per_epoch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        recipe = self.recipe
        return recipe.iters if recipe.iters is not None else (recipe.epochs or 0) * self.steps_per_epoch

    @property
    def save_every(self) -> int:
        """Steps between two checkpoints."""
        usual = self.steps_per_epoch if self.recipe.iters is None else SAVE_EVERY
        return self.options.save_every or usual

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of a step in every group.

        Return the rate of the recipe, without `lr_mult`.
        """
        rate = self.recipe.schedule.lr(step, self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        return rate

    @property
    def is_compiled(self) -> bool:
        """Whether the whole step is one compiled program."""
        return captures_step(self.options, self.world)

    def batches(self, first_step: int) -> Prefetcher:
        """Return the batches, starting with those of a step."""
        self.stream.first_step = first_step
        return Prefetcher(self.loader, self.to_input, self.world.device)


def open_session(recipe: Recipe, options: RunOptions, world: World) -> Session:
    """Return the objects of a training run.

    Raises:
        MezzoError: The recipe has no training data, the data has a fault, or an option is wrong.
    """
    if recipe.train_data is None:
        raise UnusableRecipe("the recipe has no train_dataset: there is nothing to train on")
    precision = open_precision(recipe, options, world.device)
    dataset = recipe.train_data.open()
    stream = Stream(
        len(dataset),
        recipe.batch_size,
        seed=options.seed,
        rank=world.rank,
        world_size=world.size,
        name="the training set",
    )
    seed_everything(options.seed)
    notices: list[str] = []
    if stream.is_short:
        notices.append(
            f"the training set has {len(dataset)} samples, less than one batch of {recipe.batch_size} for each of "
            f"{world.size} process{'es' if world.size > 1 else ''}: a step trains on {stream.global_batch_size} of them"
        )
    model = _create_model(recipe, options, world, notices)
    optimizer = recipe.optimizer.create(model)
    if options.fsdp:
        wrapped = shard(model, precision, world)
        optimizer = recipe.optimizer.create(model)  # sharding replaced the parameters
    precision.prepare(model, optimizer)
    if precision.policy is not None and precision.policy.fp8 is not None:
        notices.append(f"O3: {explain(model, precision.policy).fp8_layers()}")
    if not options.fsdp:
        if captures_step(options, world):
            wrapped = model  # a compiled step averages the gradients itself; hooks of DDP would do it again
            share_state(model, world)
        else:
            if options.to_static and world.size > 1:
                to_static(model, only_training=True)
            wrapped = wrap(model, world)
    seed_everything(options.seed + world.rank)
    on_gpu = world.device.type == "cuda"
    transforms = recipe.train_data.transforms
    loader = Loader(dataset, transforms, stream, seed=options.seed, workers=options.workers, pinned=on_gpu)
    return Session(
        recipe=recipe,
        options=options,
        world=world,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        precision=precision,
        task=make_task(recipe, world.device),
        stream=stream,
        loader=loader,
        to_input=ToInput(transforms.normalize, world.device, channels_last=is_channels_last(options, world.device)),
        ema=Ema(model) if options.use_ema else None,
        notices=notices,
    )


def open_precision(recipe: Recipe, options: RunOptions, device: torch.device | None = None) -> Precision:
    """Return the precision of the options; read and check their list file.

    Raises:
        OptionError: The device has no FP8 products.
        ValueError: The file is wrong.
    """
    options = options.with_precision_for(recipe.task)
    level = options.amp_level or "O1"
    precision = make_precision(
        options.precision or "fp32", level, recipe.task, options.amp_lists, options.fp8, options.amp_use_promote
    )
    recipe_of_fp8 = None if precision.policy is None else precision.policy.fp8
    if device is not None and recipe_of_fp8 is not None and not recipe_of_fp8.emulate:
        reason = why_no_fp8(device)
        if reason is not None:
            raise OptionError(
                f"--amp_level O3: {reason}; --fp8 emulate computes the same numbers without them, to see whether FP8 "
                "changes the result; or use O2"
            )
    return precision


def captures_step(options: RunOptions, world: World) -> bool:
    """Return whether a run captures whole steps.

    Sharded weights are not captured. Synchronised batch norms send inside the forward pass, which
    only DDP's way of training permits: then only this pass is captured.
    """
    return options.to_static and not options.fsdp and not (options.sync_bn and world.size > 1)


def is_channels_last(options: RunOptions, device: torch.device) -> bool:
    """Return whether images and weights are channels-last: by option, otherwise on a GPU."""
    return options.data_format == "NHWC" if options.data_format is not None else device.type == "cuda"


def _create_model(recipe: Recipe, options: RunOptions, world: World, notices: list[str]) -> nn.Module:
    model = recipe.create_model()
    if options.resume is None:
        notices += _load_pretrained(model, recipe, options)
    if options.sync_bn:
        model, notice = use_sync_batch_norm(model, world)
        notices += [notice] if notice else []
    model = model.to(world.device)
    if is_channels_last(options, world.device):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.train()


def _load_pretrained(model: nn.Module, recipe: Recipe, options: RunOptions) -> list[str]:
    """Load the weights that the options or the recipe name; return lines about them."""
    if options.pretrained is not None:
        return [str(load_weights(model, find_weights(options.pretrained)))]
    if recipe.pretrained is not None:
        return [str(_load(model, recipe.pretrained, "model.pretrained", strict=True))]
    if recipe.backbone_pretrained is not None:
        setting = "model.backbone.pretrained"
        backbone = model.get_submodule("backbone")
        return [f"backbone: {_load(backbone, recipe.backbone_pretrained, setting, strict=False)}"]
    return []


def _load(model: nn.Module, given: str, setting: str, *, strict: bool) -> LoadReport:
    """Load the weights that a recipe names.

    If a downloaded file is damaged, the error explains how to download it again.
    """
    path = find_weights(given, setting)
    try:
        return load_weights(model, path, strict=strict)
    except WeightsError as error:
        if is_url(given) and path == place_of(given):
            raise WeightsError(f"{error}; delete {path} to fetch it again") from error
        raise


def seed_everything(seed: int) -> None:
    """Seed all random generators that a step may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
