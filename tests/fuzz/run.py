"""Fuzz the readers: `make fuzz MINUTES=30`, or one input again with `--target pdparams --number 123 --keep a.pdparams`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from fuzzing import Result, generator, judge, run
from targets import all_targets


def main() -> int:
    """Run what the command line asks for; return 1 if there are defects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of all targets together")
    parser.add_argument("--count", type=int, help="inputs of each target, instead of --minutes")
    parser.add_argument("--json", type=Path, help="write the results there too")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--first", type=int, default=1_000_000, help="number of the first input")
    parser.add_argument("--number", type=int, help="try one input and say what became of it")
    parser.add_argument("--keep", type=Path, help="with --number: copy the input to this path")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    options = parser.parse_args()
    targets = all_targets()
    if unknown := set(options.target or ()) - set(targets):
        parser.error(f"unknown target {sorted(unknown)[0]!r}; there are {', '.join(targets)}")
    chosen = [target for name, target in targets.items() if not options.target or name in options.target]
    if options.number is not None:
        for target in chosen:
            folder = Path(tempfile.mkdtemp())
            path = target.make(generator(target, options.number), folder)
            if options.keep is not None:
                shutil.copy(path, options.keep)
            print(target.name, options.number, *judge(target, path))
            shutil.rmtree(folder)
        return 0
    seconds = 60 * options.minutes * min(options.jobs, len(chosen)) / len(chosen)
    limits = {"seconds": seconds} if options.count is None else {"count": options.count, "seconds": 10.0}
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda target: run(target, first=options.first, **limits), chosen))
    report(results)
    if options.json is not None:
        options.json.write_text(json.dumps({result.target: asdict(result) for result in results}))
    return 1 if any(result.defects for result in results) else 0


def report(results: list[Result]) -> None:
    """Print a table, then the defects."""
    print(f"{'target':<16}{'inputs':>10}{'accepted':>10}{'refused':>10}{'slowest s':>11}{'defects':>9}")
    for row in results:
        counts = f"{row.tried:>10}{row.accepted:>10}{row.refused:>10}{row.slowest_s:>11.2f}{len(row.defects):>9}"
        print(f"{row.target:<16}{counts}")
    print(f"{'all':<16}{sum(row.tried for row in results):>10}")
    for row in results:
        for defect in row.defects:
            print(f"\n{defect}")


if __name__ == "__main__":
    sys.exit(main())
