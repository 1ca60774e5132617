"""Run a `mezzo bench` command with two source trees in turns, and print the ratio of their times.

    git worktree add /tmp/before REVISION
    python benchmarks/two_trees.py /tmp/before . --rounds 3 -- step --model SimpleNet --optimizer AdamW

A row is one variant. Its time is the median over the rounds of the median over the steps. The stock rows do the
same work in both trees: how far their ratio is from 1 is the noise of the measurement.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def measure(tree: Path, command: list[str]) -> dict[str, float]:
    """Return the seconds of each variant."""
    environment = {**os.environ, "PYTHONPATH": str((tree / "src").resolve())}
    call = [sys.executable, "-m", "mezzo", "bench", *command, "--json"]
    done = subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return {name_of(row): row["timing"]["median_s"] for row in json.loads(done.stdout)["results"]}


def name_of(row: dict) -> str:
    """Return the name of a variant, stock or mezzo first."""
    recipe = row["recipe"]
    switches = [switch for switch in ("clips", "keeps_grads", "compact", "channels_last") if recipe.get(switch)]
    words = [
        row["model"],
        row.get("optimizer"),
        recipe.get("dtype"),
        recipe["level"],
        recipe.get("compile_mode"),
        *switches,
    ]
    return " ".join([recipe["by"], *(word for word in words if word)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    if "--" not in sys.argv:
        parser.error("put the command behind --: -- step ..., or -- static ...")
    split = sys.argv.index("--")
    options, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    for number in range(options.rounds):
        sides = {"before": options.before, "after": options.after}
        for side in sorted(sides, reverse=number % 2 == 0):  # alternate, so that drift hits both alike
            for name, seconds in measure(sides[side], command).items():
                times[name][side].append(seconds)
    print("| variant | before, ms | after, ms | after / before |\n|---|---|---|---|")
    ratios: dict[str, list[float]] = defaultdict(list)
    for name, sides_of in sorted(times.items()):
        before, after = (statistics.median(sides_of[side]) for side in ("before", "after"))
        ratios[name.split()[0]].append(after / before)
        print(f"| {name} | {before * 1e3:.3f} | {after * 1e3:.3f} | {after / before:.3f} |")
    for by, values in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        print(f"\n{by}: geometric mean {mean:.3f}, {min(values):.3f} to {max(values):.3f} over {len(values)} variants")


if __name__ == "__main__":
    main()
