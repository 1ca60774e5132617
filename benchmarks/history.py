"""The history of certification: its speed with 10,000 runs, and how often its rule of noise is wrong.

python benchmarks/history.py speed     # list, trend page and adding a run, with 10,000 runs
python benchmarks/history.py noise     # false alarms and power of the rule, for several kinds of noise
python benchmarks/history.py factors   # the table FACTORS of the rule
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch

from mezzo.report import markdown_table
from mezzo.tipc.history import HistoryRun, HistoryStep, check_history
from mezzo.tipc.history._noise import FACTORS, MIN_RUNS, WINDOW, _quantile, level_changes
from mezzo.tipc.history._rows import RUN_COLUMNS, Series
from mezzo.tipc.history._schema import open_history, transaction
from mezzo.tipc.history._store import _insert_steps, add_rows

NETWORKS, NIGHTS = 50, 200
KINDS = ("train", "check", "eval", "export", "infer", "infer", "infer", "infer", "infer", "infer")
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


# Speed
def run_of(network: int, night: int) -> HistoryRun:
    commit = f"{night // 3:040x}"
    return HistoryRun(
        id=0, key=f"{network}-{night}", network=f"network_{network:02d}", mode="lite_train_lite_infer",
        config="train_infer_python", profile="mezzo", folder=f"/runs/{night}/{network}",
        started=(FIRST + timedelta(days=night, minutes=network)).isoformat(timespec="milliseconds"), ended="",
        result=0, verdict="passed", machine="NVIDIA H200", gpu="NVIDIA H200", driver="580.1", mezzo="0.2.0",
        torch="2.11.0" if night < 150 else "2.12.0", commit_id=commit, code=commit[:20],
        versions=json.dumps({"torch": "2.11.0", "mezzo": "0.2.0", "commit": commit}),
    )  # fmt: skip


def steps_of(network: int, night: int, rng: np.random.Generator) -> list[HistoryStep]:
    steps = []
    slower = 1.15 if network % 10 == 3 and night >= 170 else 1.0  # five networks became slower
    noise = rng.lognormal(0, 0.02, len(KINDS)) * slower
    for place, (kind, factor) in enumerate(zip(KINDS, noise, strict=True)):
        labels = json.dumps({"device": "gpu" if place % 2 else "cpu", "batch": str(place)})
        device, precision = "gpu" if place % 2 else "cpu", "fp16" if place % 3 else "fp32"
        series = Series(f"network_{network:02d}", "lite_train_lite_infer", "train_infer_python", kind, labels, 0, device,
                        precision)  # fmt: skip
        status = "failed" if network == 7 and place == 5 and night > 190 else "passed"
        infers = kind == "infer"
        steps.append(
            HistoryStep(series, f"{kind}-{place}", status, "exit status 1" if status == "failed" else "", False,
                        30 * factor, 5 * factor if infers else None, 200 / factor, 0.7, "mIoU")
        )  # fmt: skip
    return steps


def fill(path: Path) -> None:
    """Write 50 networks x 200 nights x 10 steps in one transaction; `add_rows` flushes the disk for each run."""
    rng = np.random.default_rng(0)
    check_history(path)
    with open_history(path, create=True) as connection, transaction(connection):
        columns, marks = ", ".join(RUN_COLUMNS[1:]), ", ".join("?" * (len(RUN_COLUMNS) - 1))
        for night in range(NIGHTS):
            for network in range(NETWORKS):
                row = astuple(run_of(network, night))[1:]
                number = connection.execute(f"INSERT INTO runs ({columns}) VALUES ({marks})", row).lastrowid
                _insert_steps(connection, number, steps_of(network, night, rng))


def times_of(*words: str) -> tuple[str, str]:
    """Return the median time of a command in a new process, of five runs: by the clock, and of the CPU."""
    clock, cpu = [], []
    for _ in range(5):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        ended = subprocess.run([sys.executable, "-m", "mezzo", "tipc", *words], check=False, stdout=subprocess.DEVNULL)
        clock.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ended.returncode in (0, 1), words  # 1: `compare` finds that a network became slower
    return f"{statistics.median(clock):.2f}", f"{statistics.median(cpu):.2f}"


def speed(folder: Path) -> None:
    path, page = folder / "history.sqlite3", folder / "trend.html"
    fill(path)
    print(
        f"{NETWORKS * NIGHTS:,} runs, {NETWORKS * NIGHTS * len(KINDS):,} steps: {path.stat().st_size / 2**20:.1f} MiB\n"
    )
    file = ("--history", str(path))
    rows = [["command", "seconds", "CPU seconds"]]
    for words in (
        ("history",),
        ("history", "--network", "network_07", "--step", "infer", "--device", "gpu"),
        ("history", "--limit", "0", "--format", "csv"),
        ("history", "--page", str(page)),
        ("compare", "8204", "9954"),
    ):
        name = " ".join(words).replace(str(page), "trend.html")
        rows.append([f"mezzo tipc {name}", *times_of(*words, *file)])
    rng = np.random.default_rng(1)
    start = time.perf_counter()
    for night in range(NIGHTS, NIGHTS + 20):
        add_rows(path, run_of(0, night), steps_of(0, night, rng))
    rows.append(["adding a run (in a process that runs)", f"{(time.perf_counter() - start) / 20:.4f}", ""])
    print(markdown_table(rows))
    print(f"\ntrend page: {page.stat().st_size / 1e6:.2f} MB")


# Noise
def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 0.03 * rng.standard_normal(shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 0.02 * rng.standard_t(3, shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 0.03 * rng.exponential(1.0, shape)  # a quickest time, and everything else is slower


def spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 0.02 * rng.standard_normal(shape) + math.log(1.5) * (rng.random(shape) < 0.05)


def drifting(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Neighbours are alike: a room that is warmer in the afternoon (autoregressive, 0.5)."""
    noise = 0.03 * rng.standard_normal(shape)
    for place in range(1, shape[-1]):
        noise[..., place] = 0.5 * noise[..., place - 1] + math.sqrt(0.75) * noise[..., place]
    return noise


KINDS_OF_NOISE = {
    "normal, 3 %": normal,
    "heavy tails (Student t, 3 degrees), 2 %": heavy,
    "one-sided (exponential), 3 %": skewed,
    "normal 2 %, and 5 % of the runs take 1.5 times as long": spikes,
    "neighbours alike (correlation 0.5), 3 %": drifting,
}


def false_alarms(values: np.ndarray) -> tuple[float, float]:
    """Return the false alarms per 1,000 measurements that are judged: by the rule, and by a limit of 5 %."""
    count = alarms = fixed = 0
    for row in values:
        count += len(row) - MIN_RUNS
        alarms += sum(change.is_confirmed for change in level_changes(row.tolist()))
        fixed += int((np.diff(row)[MIN_RUNS - 1 :] > math.log(1.05)).sum())
    return 1000 * alarms / count, 1000 * fixed / count


def power(make, rng: np.random.Generator, size: float, before: int) -> float:
    """Return how often a change of this size is found within five runs, after so many quiet ones."""
    values = make(rng, (400, before + 5))
    values[:, before:] += math.log1p(size)
    found = 0
    for row in values:
        changes = [each for each in level_changes(row.tolist()) if each.is_confirmed and each.side > 0]
        found += any(before - 2 <= each.at for each in changes)  # an outlier may come just before
    return found / len(values)


def noise() -> None:
    rng = np.random.default_rng(0)
    sizes = (0.05, 0.1, 0.2, 0.3, 0.5)
    rows = [["noise", "false alarms per 1,000", "with a limit of 5 %"]]
    tables = {before: [["noise", *(f"+{size:.0%}" for size in sizes)]] for before in (15, 40)}
    for name, make in KINDS_OF_NOISE.items():
        own, fixed = false_alarms(make(rng, (1000, 200)))
        rows.append([name, f"{own:.2f}", f"{fixed:.0f}"])
        for before, table in tables.items():
            table.append([name, *(f"{power(make, rng, size, before):.0%}" for size in sizes)])
    print(markdown_table(rows))
    for before, table in tables.items():
        print(f"\nFound within five runs, after {before} quiet ones:\n\n{markdown_table(table)}")


def factors() -> None:
    """Print f(n) so that a change is seen once in 50,000 normal measurements on one side.

    For known quartiles the probability is exact: the first measurement is beyond the limit, and two of the next four.
    """
    rng = np.random.default_rng(7)
    for count in range(MIN_RUNS, WINDOW + 1):
        drawn = np.sort(rng.standard_normal((1_000_000, count)), axis=1)
        lower, median, upper = (_quantile(drawn.T, share) for share in (0.25, 0.5, 0.75))
        spread = np.maximum(upper - lower, 2 * (upper - median)) / 1.349
        low, high = 0.5, 100.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if _rate(median + middle * spread) > 2e-5 else (low, middle)
        print(f"{count}: {high:.2f} (in the code {FACTORS[count]})", flush=True)


def _rate(limits: np.ndarray) -> float:
    beyond = torch.special.ndtr(torch.from_numpy(-limits)).numpy()
    two_of_four = 1 - (1 - beyond) ** 4 - 4 * beyond * (1 - beyond) ** 3
    return float((beyond * two_of_four).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "noise", "factors"))
    parser.add_argument("--keep", type=Path, help="Folder for the file and the page of `speed`.")
    given = parser.parse_args()
    if given.what == "speed":
        if given.keep is not None:
            given.keep.mkdir(parents=True, exist_ok=True)
            speed(given.keep)
        else:
            with tempfile.TemporaryDirectory() as folder:
                speed(Path(folder))
    else:
        {"noise": noise, "factors": factors}[given.what]()


if __name__ == "__main__":
    main()
