"""Small runs on generated data, as commands start them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from mezzo.cli import run
from mezzo.vision.train import ScalarLog

SCRIPT = Path(__file__).parents[3] / "train.py"


def person_config(folder: Path, data: Path, **changes: Any) -> Path:
    """Write a small recipe of pp_humanseg_lite; `changes` replace top-level entries."""
    transforms = [{"type": "Resize", "target_size": [64, 64]}, {"type": "Normalize"}]
    config = {
        "batch_size": 4,
        "iters": 6,
        "train_dataset": {
            "type": "Dataset",
            "dataset_root": str(data),
            "train_path": str(data / "train.txt"),
            "num_classes": 2,
            "mode": "train",
            "transforms": [transforms[0], {"type": "RandomHorizontalFlip"}, transforms[1]],
        },
        "val_dataset": {
            "type": "Dataset",
            "dataset_root": str(data),
            "val_path": str(data / "val.txt"),
            "num_classes": 2,
            "mode": "val",
            "transforms": transforms,
        },
        "optimizer": {"type": "sgd", "momentum": 0.9, "weight_decay": 5e-4},
        "lr_scheduler": {"type": "PolynomialDecay", "learning_rate": 0.05, "end_lr": 0, "power": 0.9},
        "loss": {"types": [{"type": "CrossEntropyLoss"}], "coef": [1]},
        "model": {"type": "PPHumanSegLite", "num_classes": 2},
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump({**config, **changes}))
    return path


def train(*arguments: object) -> int:
    """Run `mezzo train` in this process and return its exit code."""
    return run(["train", "--device", "cpu", "--workers", "0", *map(str, arguments)])


def train_in_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `train.py` as a user does."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--workers", "0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def losses_of(directory: Path) -> list[tuple[int, float]]:
    """Return step and loss of every logged point, bit for bit."""
    return [(point["step"], point["loss"]) for point in ScalarLog.read_file(directory) if "loss" in point]


def printed_losses(text: str) -> list[str]:
    """Return the losses of the training lines."""
    return re.findall(r"loss: ([\d.]+)", text)
