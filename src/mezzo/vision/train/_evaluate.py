"""Evaluation: every sample of a data set once, divided among the processes."""

from __future__ import annotations

import torch
from torch import nn

from mezzo.model.parallel import World
from mezzo.model.watchdog import EVALUATED, enter
from mezzo.precision import Precision
from mezzo.record import operator_log
from mezzo.vision.data import DataError, Loader, Prefetcher, Shard, ToInput
from mezzo.vision.options import RunOptions
from mezzo.vision.recipes import DataRecipe, Recipe
from mezzo.vision.train._tasks import NetworkTask, Scores
from mezzo.vision.train.session import is_channels_last


class Evaluator:
    """Evaluates a model on one data set; its workers stay alive between calls, until `close`."""

    def __init__(self, recipe: Recipe, data: DataRecipe, options: RunOptions, task: NetworkTask, world: World) -> None:
        dataset, transforms = data.open(), data.transforms
        if len(dataset) and dataset.read(0).label is None:
            raise DataError(f"{dataset.path(0)}: has no label; evaluation needs a list with labels")
        batch_size = options.eval_batch_size or (recipe.batch_size if recipe.task == "classification" else 1)
        # With sharded weights each forward pass needs all processes: each evaluates all samples.
        rank, size = (0, 1) if options.fsdp else (world.rank, world.size)
        shard = Shard(len(dataset), batch_size, rank=rank, world_size=size)
        on_gpu = world.device.type == "cuda"
        self._loader = Loader(dataset, transforms, shard, seed=options.seed, workers=options.workers, pinned=on_gpu)
        to_input = ToInput(transforms.normalize, world.device, channels_last=is_channels_last(options, world.device))
        self._batches = Prefetcher(self._loader, to_input, world.device)
        self._task, self._images = task, len(dataset)

    def start(self) -> None:
        """Start the workers; see `Loader.start`."""
        self._loader.start()

    def close(self) -> None:
        """End the workers."""
        self._loader.close()

    def __call__(self, model: nn.Module, precision: Precision) -> Scores:
        """Return the scores of the model; its mode (train or eval) is restored."""
        was_training = model.training
        model.eval()
        self._task.start_evaluation()
        try:
            with torch.no_grad(), operator_log.paused(), precision.autocast():
                for batch in self._batches:
                    self._task.measure(model, batch)
        finally:
            model.train(was_training)
        enter(EVALUATED)
        return self._task.finish_evaluation(self._images)
