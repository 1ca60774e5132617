"""Weights for evaluation and export: they decide the number of classes, and must be complete."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from mezzo.checkpoint import LoadReport, WeightsError, load_weights, paddle_state, read_torch_state
from mezzo.vision.models._registry import model_info


def count_classes(name: str, path: str | os.PathLike[str]) -> int | None:
    """Return the number of classes in a weights file of a network; None if it has no head.

    Raises:
        WeightsError: The file cannot be read, or its heads have different numbers of classes.
    """
    heads = model_info(name).head_keys
    sizes = {
        key: value.shape[0]
        for key, value in read_torch_state(Path(path)).items()
        if key.startswith(heads) and value.dim()
    }
    counts = set(sizes.values())
    if len(counts) > 1:
        raise WeightsError(
            f"{path}: its heads have {', '.join(map(str, sorted(counts)))} classes; {name} has one number"
        )
    return counts.pop() if counts else None


def load_trained(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Load weights for evaluation or export: the file must hold every entry of the network.

    Raises:
        WeightsError: The file is for another number of classes, or lacks entries. The model may have changed.
    """
    report = load_weights(model, path)
    if report.heads:
        raise WeightsError(
            f"{path}: trained for another number of classes, (in the file, requested): {report.heads[0]}; "
            "leave the number of classes out, or give that of the weights"
        )
    lacking = sorted(set(paddle_state(model)) - set(report.loaded))
    if lacking:
        raise WeightsError(
            f"{path}: has no weights for {len(lacking)} entries of the network, {lacking[0]} among them; "
            "these may be weights of the backbone only, to start a training from"
        )
    return report
