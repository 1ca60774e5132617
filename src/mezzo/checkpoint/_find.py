"""Weights that are named by a file, by the folder of a checkpoint, or by that of a run."""

from __future__ import annotations

import re
from pathlib import Path

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._store import CheckpointStore

BEST = "best_model"


def find_weights(given: str | Path, setting: str = "model.pretrained") -> Path:
    """Return the file of weights that are given as a file, as the folder of a checkpoint, or as that of a run.

    Raises:
        CheckpointError: It is an address, which is not fetched, is not there, or is a folder without weights.
    """
    if re.match(r"\w+:/", str(given)):
        raise CheckpointError(
            f"{given}: weights are not downloaded; fetch the file and give its path, or start without: "
            f"--opts {setting}=FILE or {setting}=null"
        )
    path = Path(given)
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no such file or folder; give a file of weights or a checkpoint's folder"
        )
    if not path.is_dir():
        return path
    newest = CheckpointStore(path).latest()
    for folder in (path, path / BEST, *([newest] if newest is not None else [])):
        for name in ("model.safetensors", "model.pdparams"):
            if (folder / name).exists():
                return folder / name
    raise CheckpointError(
        f"{path}: no weights in it (model.safetensors, model.pdparams); give a file or a checkpoint's folder"
    )
