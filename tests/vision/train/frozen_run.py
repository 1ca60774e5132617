"""A training run whose batch norms are frozen, so that a batch may be split among processes; started by tests.

torchrun ... frozen_run.py OUT CONFIG BATCH_SIZE PRECISION LEVEL [OPTION ...]
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mezzo.vision.recipes import ModelRecipe, load_recipe
from mezzo.vision.train import RunOptions, train


class Frozen(ModelRecipe):
    """Makes networks whose norms use fixed statistics."""

    def create(self) -> nn.Module:
        model = ModelRecipe.create(self)
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
                module.eval()
                module.training = False
                nn.init.uniform_(module.weight, 0.5, 1.5)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        return model


def main() -> None:
    out, config, batch_size, precision, level, *extra = sys.argv[1:]
    recipe = load_recipe(Path(config), batch_size=int(batch_size), learning_rate=1e-3)
    frozen = Frozen(**{name: getattr(recipe.model, name) for name in ModelRecipe.__dataclass_fields__})
    options: dict[str, Any] = {name: True for name in extra}
    run = RunOptions(
        save_dir=Path(out),
        precision=precision,
        amp_level=level,
        device="cpu",
        workers=0,
        log_every=1,
        save_every=1,
        **options,
    )
    train(replace(recipe, model=frozen), run)


if __name__ == "__main__":
    main()
