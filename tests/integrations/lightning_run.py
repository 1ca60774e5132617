"""A Lightning run in a process of its own: `lightning_run.py FOLDER OPTIONS` trains, may die, and may resume.

Writes a checkpoint after each epoch, and at the end `rank<N>.pt` with model, optimizer and loss scale.
"""

import argparse
import os
import signal
import warnings
from pathlib import Path

import torch
from lightning_nets import QUIET, Classifier, L, make_batches, make_loader

from mezzo import amp
from mezzo.integrations.lightning import MezzoPrecision


class Dies(L.Callback):
    """Kills the process in the middle of an epoch, after some batches in all."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", choices=("float16", "bfloat16", "compact", "fp8"), default="float16")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dies-after", type=int)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ModelCheckpoint = getattr(L, "pytorch", L).callbacks.ModelCheckpoint
    plugin = {
        # the scale grows during the run, and its counter must be resumed too
        "float16": lambda: MezzoPrecision("O2", scaler=amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3)),
        "bfloat16": lambda: MezzoPrecision("O2", "bfloat16"),
        "compact": lambda: MezzoPrecision("O2", "bfloat16", master_weight="compact"),
        "fp8": lambda: MezzoPrecision(
            "O3",
            "bfloat16",
            fp8={"emulate": True, "min_width": 0, "min_size": 0, "scaling": "delayed"},
            half_layers=(),
        ),
    }[options.recipe]()
    callbacks: list[L.Callback] = [ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1)]
    if options.dies_after:
        callbacks.append(Dies(options.dies_after))
    parallel = {"devices": options.devices, "strategy": "ddp" if options.devices > 1 else "auto"}
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": True, **parallel},
        max_epochs=options.epochs,
        plugins=[plugin],
        callbacks=callbacks,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    model = Classifier()
    if trainer.global_rank:  # the first rank's weights count
        torch.nn.init.normal_(model.net[0].weight)
    trainer.fit(model, make_loader(make_batches(8)), ckpt_path=options.resume)
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "plugin": plugin.state_dict(),
        "loss": model.losses[-1],
    }
    torch.save(state, options.folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
