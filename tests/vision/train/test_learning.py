"""Networks learn on lite data, in half as well as in float32: three seeds each, minutes on two cores."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_runs import SCRIPT, person_config

from mezzo.vision.lite import prepare
from mezzo.vision.train import read_scalars

PRECISIONS = {"FP32": ["fp32"], "O1": ["fp16", "--amp_level", "O1"], "O2": ["fp16", "--amp_level", "O2"]}
SEEDS = (0, 1, 2)


def best_of(out: Path, metric: str, arguments: list[object]) -> float:
    """Train in a process of one thread; return the best result."""
    common = ["--device", "cpu", "--workers", 0, "--save_interval", 100000, "--save_dir", out]
    command = [sys.executable, str(SCRIPT), *map(str, (*arguments, *common))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return max(point[metric] for point in read_scalars(out / "scalars.jsonl") if metric in point)


def train_all(tmp_path: Path, metric: str, arguments: list[object]) -> dict[str, list[float]]:
    with ThreadPoolExecutor(2) as pool:
        runs = {
            (name, seed): pool.submit(
                best_of, tmp_path / f"{name}_{seed}", metric, [*arguments, "--precision", *precision, "--seed", seed]
            )
            for seed in SEEDS
            for name, precision in PRECISIONS.items()
        }
        return {name: [runs[name, seed].result() for seed in SEEDS] for name in PRECISIONS}


def check(results: dict[str, list[float]], at_least: float) -> None:
    """Every run learns; the mean of each precision lies within the noise of float32's."""
    print(results)
    assert min(min(values) for values in results.values()) > at_least
    mean = {name: sum(values) / len(values) for name, values in results.items()}
    noise = max(max(values) - min(values) for values in results.values())
    for name in ("O1", "O2"):
        assert abs(mean[name] - mean["FP32"]) <= noise


@pytest.mark.slow
def test_a_segmentation_network_learns_in_every_precision(tmp_path: Path) -> None:
    data = prepare("mini_supervisely", tmp_path / "data")
    config = person_config(tmp_path, data, batch_size=8, iters=250)
    # All background has a mean IoU of 0.4.
    check(train_all(tmp_path, "val_mIoU", ["--config", config, "--do_eval"]), at_least=0.8)


@pytest.mark.slow
def test_a_classifier_learns_in_every_precision(tmp_path: Path) -> None:
    # 800 steps: the running statistics have a memory of a hundred, and begin far off.
    data = prepare("imagenet_lite", tmp_path / "data")
    options = "--epochs 20 --batch-size 16 --lr 0.03 --lr-step-size 1 --lr-gamma 0.82 --image-size 40 --resize-size 40"
    # One of 16 is 0.0625.
    check(train_all(tmp_path, "val_top1", ["--data-path", data, *options.split(), "--crop-scale", 0.5]), at_least=0.6)
