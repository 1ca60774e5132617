"""Finds weights by URL, file, folder of a checkpoint, or folder of a run."""

from __future__ import annotations

import re
from pathlib import Path

from mezzo.checkpoint._errors import CheckpointError
from mezzo.checkpoint._store import CheckpointStore
from mezzo.errors import MezzoError
from mezzo.fetch import fetch, is_url, terminal_progress
from mezzo.files import check_manifest

BEST = "best_model"


def find_weights(given: str | Path, setting: str | None = None) -> Path:
    """Return the weights file for a URL, a file, the folder of a checkpoint, or the folder of a run.

    A URL is downloaded into the cache of `mezzo.fetch`, with a progress bar or lines on stderr.

    Args:
        given: A URL begins with http:, https: or file:.
        setting: Name of the setting in a recipe, if the training can start without weights; for messages.

    Raises:
        RunError: A URL cannot be downloaded; the message names the path for a manual download.
        FetchError: A URL cannot be used, or its file in the cache has changed.
        CheckpointError: There is no such file, or the folder has no weights, or they differ from its manifest.
    """
    text = str(given)
    if isinstance(given, Path):
        text = re.sub("^(https?):/+", r"\1://", text, flags=re.IGNORECASE)  # a Path has lost a slash
    if is_url(text):
        return _fetched(text, setting)
    if re.match(r"\w+:/", text):
        raise CheckpointError(
            f"{text}: weights are fetched by http:, https: and file: only; give one of these or a path"
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
                check_manifest(folder, [name], raising=CheckpointError)
                return folder / name
    raise CheckpointError(
        f"{path}: no weights in it (model.safetensors, model.pdparams); give a file or a checkpoint's folder"
    )


def _fetched(url: str, setting: str | None) -> Path:
    try:
        with terminal_progress(url) as progress:
            return fetch(url, progress=progress)
    except MezzoError as error:
        if setting is None:
            raise
        raise type(error)(f"{error}, or start without: --opts {setting}=null") from error
