"""The record of a run: command, versions, seed, machine and resolved configuration."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from mezzo._version import version_of
from mezzo.files import report_write_errors, write_file
from mezzo.vision.train.session import Session

PACKAGES = ("mezzo", "torch", "numpy", "opencv-python-headless", "Pillow", "safetensors")


def write_record(session: Session, directory: Path) -> None:
    """Write `config.yml` and `run.json`."""
    with report_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "config.yml", yaml.safe_dump(session.recipe.resolved, sort_keys=False).encode())
    write_file(directory / "run.json", (json.dumps(describe_run(session), indent=2) + "\n").encode())


def describe_run(session: Session) -> dict[str, Any]:
    """Return the facts of a run as plain data."""
    device = session.world.device
    versions = {name: version for name in PACKAGES if (version := version_of(name)) is not None}
    versions["torch"] = str(torch.__version__)  # also names the build, such as +cu132
    return {
        "command": sys.argv,
        "options": session.options.to_dict(),
        "precision": session.precision.name,
        "processes": session.world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "python": platform.python_version(),
        "versions": versions,
        "steps": session.steps,
        "steps_per_epoch": session.steps_per_epoch,
        "parameters": sum(p.numel() for p in session.model.parameters() if p.requires_grad),
    }
