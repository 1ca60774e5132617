"""Logs the numbers of a run to Weights & Biases, if the user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mezzo.errors import RunError, one_line


class WandbLog:
    """A run of Weights & Biases; project and mode come from its own environment variables.

    Args:
        directory: Folder of the run; wandb keeps its files there, and the run has its name.
        precision: Noted as configuration.

    Raises:
        RunError: wandb cannot start the run, for example without an account.
    """

    def __init__(self, directory: Path, precision: str) -> None:
        import wandb  # optional, and slow to load

        try:
            self._run = wandb.init(dir=directory, name=directory.resolve().name, config={"precision": precision})
        except wandb.errors.Error as error:
            raise RunError(f"--wandb: {one_line(error)}; run `wandb login`, or set WANDB_MODE=offline") from error

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step. wandb sends them from a process of its own."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run: wait until wandb has sent or written everything."""
        self._run.finish()
