"""Train on the real packs in fp32, O1, O2 and bf16 with three seeds each: metric and time, as a table and a plot.

cifar10 with mobilenet_v3_small, camvid11 with pp_liteseg_stdc1 (benchmarks/camvid11.yml), from scratch, by the documented
command lines. The seeds of a task run side by side to save time, so their times are not measured; a separate run
on the idle machine gives the time of a step.

    PYTHONPATH=src python benchmarks/packs.py DATA_FOLDER OUT_FOLDER [cifar10] [camvid11] [timing]
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mezzo.vision.train import plot_curves, read_scalars

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
SIDE_BY_SIDE = 4
WORKERS = 3
PRECISIONS = {
    "FP32": ["--precision", "fp32"],
    "O1 fp16": ["--precision", "fp16", "--amp_level", "O1"],
    "O2 fp16": ["--precision", "fp16", "--amp_level", "O2"],
    "O2 bf16": ["--precision", "bf16", "--amp_level", "O2"],
}
CIFAR = "--data-path cifar10 --image-size 128 --resize-size 128 --crop-scale 0.5 --batch-size 512 --epochs 30 "
CIFAR += "--opt adamw --lr 0.004 --lr-step-size 1 --lr-gamma 0.87 --wd 0.02 "
CIFAR += "--print-freq 43 --save_interval 1305 --to_static_training"
CAMVID = f"--config {ROOT}/benchmarks/camvid11.yml --do_eval --save_interval 750 --log_iters 50 --to_static_training"
TASKS = {"cifar10": (CIFAR.split(), "val_top1"), "camvid11": (CAMVID.split(), "val_mIoU")}
TIMED = {
    "cifar10": ["--epochs", "3", "--print-freq", "10"],
    "camvid11": ["--iters", "160", "--log_iters", "20", "--save_interval", "1000"],
}


def start(data: Path, out: Path, arguments: list[str], workers: int) -> subprocess.Popen:
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "train.py"), *arguments, "--save_dir", str(out), "--workers", str(workers)]
    return subprocess.Popen(command, cwd=data, stdout=out.with_suffix(".log").open("w"), stderr=subprocess.STDOUT)


def train_all(task: str, data: Path, out: Path) -> None:
    """Train every precision with every seed, some side by side."""
    waiting = [(seed, name) for seed in SEEDS for name in PRECISIONS]
    running: list[subprocess.Popen] = []
    while waiting or running:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < SIDE_BY_SIDE:
            seed, name = waiting.pop(0)
            arguments = [*TASKS[task][0], *PRECISIONS[name], "--seed", str(seed)]
            running.append(start(data, folder(out, task, name, seed), arguments, WORKERS))
        time.sleep(0.5)


def time_all(task: str, data: Path, out: Path) -> None:
    """Train each precision for a short while, alone on the machine, as written and as a captured step."""
    for name, precision in PRECISIONS.items():
        for how in ("eager", "captured"):
            arguments = [*TASKS[task][0], *precision, *TIMED[task]]
            if how == "eager":
                arguments.remove("--to_static_training")
            start(data, folder(out, f"{task}_{how}", name, "timing"), arguments, 12).wait()


def folder(out: Path, task: str, name: str, seed: object) -> Path:
    return out / task / f"{name.replace(' ', '_')}_{seed}"


def table(task: str, out: Path) -> list[str]:
    metric = TASKS[task][1]
    found = {
        name: [
            max((p[metric] for p in points(folder(out, task, name, seed)) if metric in p), default=float("nan"))
            for seed in SEEDS
        ]
        for name in PRECISIONS
    }
    right = statistics.mean(found["FP32"])
    lines = [f"{task}: {metric}, best of the run, seeds {SEEDS}"]
    for name, values in found.items():
        each = " ".join(f"{value:.4f}" for value in values)
        mean = statistics.mean(values)
        lines.append(
            f"  {name:8s} {each}  mean {mean:.4f}  difference {mean - right:+.4f}  spread {spread(values):.4f}"
        )
    return lines


def timing(task: str, out: Path) -> list[str]:
    lines = []
    for how in ("eager", "captured"):
        lines.append(f"{task}: milliseconds a step, alone, {how}; in brackets the wait for data; images a second")
        for name in PRECISIONS:
            rows = [p for p in points(folder(out, f"{task}_{how}", name, "timing")) if "batch_cost" in p][1:]
            if rows:
                cost, wait, ips = (
                    statistics.median(row[key] for row in rows) for key in ("batch_cost", "reader_cost", "ips")
                )
                lines.append(f"  {name:8s} {cost * 1e3:7.2f} ({wait * 1e3:.2f})  {ips:9.0f}")
    return lines


def spread(values: list[float]) -> float:
    return max(values) - min(values)


def points(run: Path) -> list[dict]:
    path = run / "scalars.jsonl"
    return read_scalars(path) if path.exists() else []


def main() -> None:
    data, out, *wanted = sys.argv[1:]
    data, out = Path(data), Path(out)
    tasks = [task for task in TASKS if not wanted or task in wanted]
    lines = []
    for task in tasks:
        begun = time.time()
        if "timing" not in wanted or len(wanted) > 2:
            train_all(task, data, out)
            lines += [*table(task, out), f"  {time.time() - begun:.0f} s for all"]
            runs = {name: folder(out, task, name, 0) / "scalars.jsonl" for name in PRECISIONS}
            plot_curves({name: path for name, path in runs.items() if path.exists()}, out / f"{task}.png", "loss")
        if "timing" in wanted:
            time_all(task, data, out)
            lines += timing(task, out)
    (out / "packs.json").write_text(json.dumps(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
