"""The statistics against a witness of another making: torch's profiler writes down operators and dtypes on its own."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.amp import Policy
from mezzo.amp.debugging import collect_operator_stats
from mezzo.bench import find_workload
from mezzo.precision import Precision
from mezzo.trial import Trial, TrialSetup

Counts = dict[str, Counter[str]]

FLOATING = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32", "double": "other"}
COLUMNS = ("fp16", "bf16", "fp32", "other")
UNKNOWN = "unknown"
"""No input is floating: the statistics go by the output, of which the profiler says nothing."""
TAKE_LISTS = {"stack", "cat", "_foreach_norm", "_foreach_copy_", "_fused_sgd_", "_foreach_mul"}
"""Operators whose first input is a list of tensors: the profiler does not tell the dtype of those."""
SAME = {"add_": "add"}
"""The engine sums gradients in place, but under a dispatch mode into a new tensor."""


def column(event: dict[str, Any]) -> str:
    types = event["args"].get("Input type", [])
    return next((FLOATING[kind] for kind in types if kind in FLOATING), UNKNOWN)


def operator(event: dict[str, Any]) -> str:
    name: str = event["name"]
    return name.removeprefix("aten::")


def with_parents(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield the events of one thread with those around each, the outermost first."""
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        yield event, list(around)
        around.append(event)


def profiled_counts(trial: Trial, names: set[str], path: Path) -> Counts:
    """Return what the profiler counts of a step: the outermost events among the named operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        trial.step()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if e.get("cat") == "cpu_op"]
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append(event)
    counts: Counts = {}
    for thread in threads.values():
        rows = list(with_parents(thread))
        # The profiler notes a call when it comes in, and casts by policy are made below that. So of two events of one
        # name, one inside of the other, the outer is the call as it was written, the inner what ran.
        written = {id(p) for event, parents in rows for p in parents if operator(p) == operator(event)}
        for event, parents in rows:
            name = operator(event)
            ran = [p for p in parents if id(p) not in written and operator(p) in names]
            if name in names and id(event) not in written and not ran:
                counts.setdefault(SAME.get(name, name), Counter())[column(event)] += 1
    lists = {operator(e) for e in events if e["args"].get("Input type", [""])[0] == "TensorList"}
    assert lists & names <= TAKE_LISTS
    return counts


def recorded_counts(trial: Trial) -> Counts:
    with collect_operator_stats(False) as stats:
        trial.step()
    counts: Counts = {}
    for name, calls in stats.totals().items():
        counts.setdefault(SAME.get(name, name), Counter()).update(dict(zip(COLUMNS, calls, strict=True)))
    return counts


def make_trainer(name: str, level: str, dtype: str, cpu_compute: str) -> Trial:
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine take twenty times as long
    trial = Trial(find_workload(name, 2, 64).copied(torch.device("cpu")), TrialSetup(level=level, dtype=dtype))
    policy = Policy.create(level, dtype, cpu_compute=cpu_compute)  # the same on every CPU
    trial.precision = Precision(policy=policy)
    trial.step()  # what happens once, such as the optimizer's state, is over
    return trial


@pytest.mark.parametrize(
    ("level", "dtype", "cpu_compute"),
    [
        pytest.param("O1", "float16", "native", marks=pytest.mark.slow),  # few CPUs have units for it
        ("O1", "float16", "float32"),
        ("O2", "bfloat16", "native"),
        ("O2", "bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize("name", ["mobilenet_v3_small", "pp_liteseg_stdc1", "pphumanseg_lite"])
def test_statistics_equal_the_profilers_own_record_of_dtypes(
    name: str, level: str, dtype: str, cpu_compute: str, tmp_path: Path
) -> None:
    trial = make_trainer(name, level, dtype, cpu_compute)
    recorded = recorded_counts(trial)
    profiled = profiled_counts(trial, {*recorded, *SAME}, tmp_path / "trace.json")

    compared = recorded.keys() - TAKE_LISTS
    assert compared >= {"convolution", "convolution_backward", "_to_copy", "add"}
    wrong = {}
    for op in compared:
        seen, witness = recorded[op], profiled.get(op, Counter())
        is_same = all(seen[c] >= witness[c] for c in COLUMNS) and seen.total() == witness.total()
        rest = sum(seen[c] - witness[c] for c in COLUMNS)
        if not is_same or rest != witness[UNKNOWN]:
            wrong[op] = (dict(seen), dict(witness))
    assert wrong == {}
    half = "fp16" if dtype == "float16" else "bf16"
    ran_in = half if cpu_compute == "native" else "fp32"
    assert recorded["convolution"][ran_in] == recorded["convolution"].total()


def test_operators_that_take_lists_agree_in_number(tmp_path: Path) -> None:
    trial = make_trainer("pphumanseg_lite", "O1", "bfloat16", "native")
    recorded = recorded_counts(trial)
    profiled = profiled_counts(trial, {*recorded, *SAME}, tmp_path / "trace.json")
    found = recorded.keys() & TAKE_LISTS
    assert found >= {"cat", "stack"}
    assert {op: recorded[op].total() for op in found} == {op: profiled[op].total() for op in found}
