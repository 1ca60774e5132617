"""Kills trainings at random moments and resumes them; flips bytes of checkpoints; measures what checksums cost.

    python benchmarks/kills.py --kills 100 --flips 1000
    python benchmarks/kills.py --kills 0 --flips 0 --cost OLD_SRC      # OLD_SRC: a folder `src` of another version

A kill is a SIGKILL to a training and its worker, after a random part of the time that the unbroken run takes. The training
is a fork of this process, which has imported everything, so a kill costs no start-up. `--resume auto` goes on each time; each
run is killed a few times and then left to its end. Its final state must be that of the unbroken run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
KILLS_A_RUN = 5  # then the run may come to its end
STEPS = 12
FINAL = ("model.safetensors", "state.safetensors", "state.json")


def main() -> None:
    """Do what the command line asks for, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--cost", type=Path, help="folder `src` of the version to compare with")
    parser.add_argument("--repeats", type=int, default=15, help="of each measurement of the cost")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.kills or options.flips:
            command = prepare(Path(folder))
            whole = Path(folder) / "whole"
            started = time.monotonic()
            assert wait(start([*command, "--save_dir", str(whole)])) == 0, "the unbroken run failed"
            length_s = time.monotonic() - started
            if options.kills:
                report_kills(rng, command, Path(folder), whole, length_s, options.kills)
            if options.flips:
                report_flips(rng, Path(folder), whole, options.flips)
        if options.cost is not None:
            report_cost(options.cost, options.repeats, Path(folder))


# Kills


def prepare(folder: Path) -> list[str]:
    """Make data and a recipe; return the command of a small training. Everything that it needs is imported after this."""
    import yaml

    from mezzo.vision.lite import prepare as prepare_data

    data = prepare_data("mini_supervisely", folder / "data", count=(8, 2, 2), size=(32, 32))

    def split(name: str) -> dict[str, object]:
        transforms = [
            {"type": "Resize", "target_size": [32, 32]},
            {"type": "RandomHorizontalFlip"},
            {"type": "Normalize"},
        ]
        transforms = transforms if name == "train" else [transforms[0], transforms[2]]
        paths = {"dataset_root": str(data), f"{name}_path": str(data / f"{name}.txt")}
        return {"type": "Dataset", **paths, "num_classes": 2, "mode": name, "transforms": transforms}

    recipe = {
        "batch_size": 2,
        "iters": STEPS,
        "train_dataset": split("train"),
        "val_dataset": split("val"),
        "optimizer": {"type": "sgd", "momentum": 0.9, "weight_decay": 5e-4},
        "lr_scheduler": {"type": "PolynomialDecay", "learning_rate": 0.05, "end_lr": 0, "power": 0.9},
        "loss": {"types": [{"type": "CrossEntropyLoss"}], "coef": [1]},
        "model": {"type": "PPHumanSegLite", "num_classes": 2},
    }
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe))
    command = ["train", "--config", str(folder / "recipe.yml"), "--device", "cpu", "--workers", "1", "--do_eval"]
    command += ["--precision", "fp16", "--amp_level", "O2", "--use_ema", "--save_interval", "1", "--log_iters", "1"]
    assert wait(start([*command, "--iters", "1", "--save_dir", str(folder / "warm")], import_first=True)) == 0
    return command


def start(command: list[str], *, import_first: bool = False) -> int:
    """Run a command in a fork with a process group of its own; return its process."""
    if import_first:
        import matplotlib.figure  # noqa: F401

    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        from mezzo.cli import run

        code = run(command)
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> bool:
    """Kill a training and its worker; return whether it was still running."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group yet, or is gone
        os.kill(pid, signal.SIGKILL)
    return wait(pid) == -signal.SIGKILL


def report_kills(
    rng: random.Random, command: list[str], folder: Path, whole: Path, length_s: float, wanted: int
) -> None:
    kills, runs, equal, done_before_kill, failed = 0, 0, 0, 0, 0
    started = time.monotonic()
    while kills < wanted:
        out = folder / f"broken_{runs}"
        resumed = [*command, "--save_dir", str(out), "--resume", "auto"]
        for _ in range(min(KILLS_A_RUN, wanted - kills)):
            pid = start(resumed)
            time.sleep(rng.uniform(0.02, 0.9) * length_s)
            was_running = kill(pid)
            kills, done_before_kill = kills + was_running, done_before_kill + (not was_running)
        failed += wait(start(resumed)) != 0
        runs += 1
        equal += all(same(out, whole, name) for name in FINAL)
        shutil.rmtree(out)
    print(f"{'kills':>8}{'runs':>8}{'bit-exact':>12}{'failed':>8}{'ended first':>13}{'seconds':>9}")
    print(
        f"{kills:>8}{runs:>8}{equal:>12}{failed:>8}{done_before_kill:>13}{time.monotonic() - started:>9.0f}", flush=True
    )


def same(one: Path, other: Path, name: str) -> bool:
    paths = [run / f"iter_{STEPS}" / name for run in (one, other)]
    return paths[0].exists() and paths[0].read_bytes() == paths[1].read_bytes()


# Flipped bytes


def report_flips(rng: random.Random, folder: Path, whole: Path, wanted: int) -> None:
    from mezzo.checkpoint import CheckpointError, verify

    checkpoint = folder / "flipped"
    shutil.copytree(whole / f"iter_{STEPS}", checkpoint)
    verify(checkpoint)
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    counts = {path.name: [0, 0] for path in files}
    for number in range(wanted):
        # Half of the flips are spread over the files, half over the bytes: small files count too.
        sizes = [1 if number % 2 else path.stat().st_size for path in files]
        path = rng.choices(files, sizes)[0]
        with path.open("r+b") as file:
            place = rng.randrange(path.stat().st_size)
            file.seek(place)
            before = file.read(1)
            file.seek(place)
            file.write(bytes([before[0] ^ rng.randrange(1, 256)]))
            file.flush()
            counts[path.name][0] += 1
            try:
                verify(checkpoint)
            except CheckpointError as error:
                counts[path.name][1] += path.name in str(error)
            file.seek(place)
            file.write(before)
    verify(checkpoint)
    print(f"{'file':<20}{'flips':>8}{'noticed':>9}")
    counts["all"] = [sum(count[column] for count in counts.values()) for column in (0, 1)]
    for name, (flips, noticed) in counts.items():
        print(f"{name:<20}{flips:>8}{noticed:>9}", flush=True)


# Cost

MEASURE = """
import inspect, json, sys, tempfile, time
from pathlib import Path
import torch
from mezzo.checkpoint import CheckpointStore, save_weights, write_state
from mezzo.vision.models import create_model
torch.manual_seed(0)
extra = {"with_manifest": False} if "with_manifest" in inspect.signature(write_state).parameters else {}
model = create_model("mobilenet_v3_small")
state = {"optimizer": {i: torch.randn_like(p) for i, p in enumerate(model.parameters())}}
large = {"optimizer": {i: torch.randn(25, 1 << 20) for i in range(2)}}
def small(folder):
    save_weights(folder, model)
    write_state(folder, state, **extra)
cases = {"mobilenet_v3_small": small, "200 MB state": lambda folder: write_state(folder, large, **extra)}
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    store = CheckpointStore(Path(folder))
    for name, write in cases.items():
        start = time.perf_counter()
        store.save("iter_1", write)
        print(json.dumps([name, time.perf_counter() - start]), flush=True)
"""


def report_cost(old: Path, repeats: int, folder: Path) -> None:
    """Measure the saving of checkpoints with both versions in turns, each time in a new process."""
    import json

    new = Path(__file__).parents[1] / "src"
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for label, source in (("before", old), ("after", new)):
            environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
            done = subprocess.run(
                [sys.executable, "-c", MEASURE, str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            for line in done.stdout.splitlines():
                name, seconds = json.loads(line)
                times.setdefault(name, {}).setdefault(label, []).append(seconds)
    print(f"{'checkpoint':<22}{'before ms':>11}{'after ms':>10}{'ratio':>8}   (medians of {repeats})")
    for name, columns in times.items():
        before, after = (1000 * statistics.median(columns[label]) for label in ("before", "after"))
        print(f"{name:<22}{before:>11.1f}{after:>10.1f}{after / before:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
