"""The overhead of recording: a plain training step, and one recorded with operators, leaks or kernel times.

    python benchmarks/recording.py [--device cuda] [--json FILE]

Without a recording there must be no overhead: the first and the last row are the same step, before and after all
recordings. Kernel times come last: torch's profiler stays attached to the driver, and later launches take longer.
"""

import argparse
import json
import statistics
from contextlib import nullcontext
from pathlib import Path

import torch

from mezzo.amp.debugging import collect_operator_stats
from mezzo.bench import find_workload
from mezzo.record import time_calls
from mezzo.trial import Trial, TrialSetup

NETWORKS = [
    ("mobilenet_v3_small", 256, 224),
    ("pp_liteseg_stdc1", 8, 512),
    ("pp_liteseg_stdc1", 32, 512),
    ("pp_liteseg_stdc1", 64, 512),
]
WAYS: dict[str, dict[str, bool] | None] = {
    "off, before": None,
    "operators": {},
    "operators, leaks": {"leaks": True},
    "off, after": None,
}
PROFILED: dict[str, dict[str, bool] | None] = {"operators, kernels": {"kernels": True}, "off, after a profile": None}
ROUNDS = 3
"""Rounds over all ways of a network; the median counts."""


def step_ms(trial: Trial, options: dict[str, bool] | None, device: torch.device) -> float:
    def step() -> None:
        with nullcontext() if options is None else collect_operator_stats(False, **options):
            trial.step()

    is_profiled = bool(options and options.get("kernels"))
    return 1e3 * time_calls(step, calls=3 if is_profiled else 10, warmup_calls=2, device=device).median_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="small batches, as a smoke test")
    options = parser.parse_args()
    device = torch.device(options.device)
    found: dict[str, dict[str, float]] = {}
    for ways in (WAYS, PROFILED):
        for name, full_batch, full_size in NETWORKS if ways is WAYS else NETWORKS[:2]:
            batch, size = (2, 64) if options.small else (full_batch, full_size)
            workload = find_workload(name, batch, size).copied(device)
            workload.model.to(memory_format=torch.channels_last)
            trial = Trial(workload, TrialSetup(level="O1", is_decorated=True))
            key = f"{name} {batch}x{size}"
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS if ways is WAYS else 1):
                for way, extra in ways.items():
                    times[way].append(step_ms(trial, extra, device))
            found.setdefault(key, {}).update({way: statistics.median(each) for way, each in times.items()})
            for way in ways:
                ms, off = found[key][way], found[key]["off, before"]
                print(f"{key:28} {way:20} {ms:9.2f} ms  {ms / off:5.2f}x", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "device": str(device), "ms": found}, indent=2))


if __name__ == "__main__":
    main()
