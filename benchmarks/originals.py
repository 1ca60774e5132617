"""Run the unmodified TIPC texts and YAML files of the documents in a fresh copy of the repository.

python benchmarks/originals.py FOLDER...            # FOLDER/test_tipc/configs/NETWORK/train_*.txt
python benchmarks/originals.py FOLDER --lanes 4     # four at a time, each with a quarter of the cores

Prints a table of seconds; exit status 1 if a run did not end with 0.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
MODE = "lite_train_lite_infer"
COLUMNS = ("train-1", "eval-1", "export-1", "infer-1", "infer-2", "train-2", "eval-2", "export-2", "infer-3", "infer-4")


def fresh_copy(configs: Path, folder: Path) -> Path:
    """Return a folder with the repository's scripts and texts, the given texts over them."""
    for name in ("train.py", "export.py", "val.py", "tools", "deploy", "test_tipc"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("data", "output", "lite_cpu.yml"))
        else:
            shutil.copyfile(source, folder / name)
    (folder / "src").mkdir()
    (folder / "src/mezzo").symlink_to(ROOT / "src/mezzo")  # by which the repository is known
    shutil.copytree(configs, folder / "test_tipc/configs", dirs_exist_ok=True)
    return folder


def run_text(configs: Path, text: str, lane: set[int]) -> dict[str, object]:
    """Prepare and run a text on some cores; return seconds and states of its steps."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MEZZO_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as name:
        folder = fresh_copy(configs, Path(name))
        path, begun = f"test_tipc/configs/{text}", time.monotonic()
        codes = []
        for script in ("prepare.sh", "test_train_inference_python.sh"):
            command = ["bash", f"test_tipc/{script}", path, MODE]
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=lambda: os.sched_setaffinity(0, lane),
            )
            codes.append(done.returncode)
            if done.returncode:
                print(f"{text}: {script} ended with {done.returncode}\n{done.stdout[-3000:]}", file=sys.stderr)
        seconds = time.monotonic() - begun
        found = list(folder.glob("test_tipc/output/*/**/steps.jsonl"))
        lines = found[0].read_text().splitlines() if found else []
    steps = {record["step"]: record for record in map(json.loads, lines)}
    return {"text": text, "codes": codes, "seconds": seconds, "steps": steps}


def shown(record: dict[str, object] | None) -> str:
    if record is None:
        return ""
    if record["status"] == "passed":
        return f"{record['seconds']:.0f}"
    return f"{record['status']}: {record['reason']}" if record["status"] == "skipped" else f"**{record['status']}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders that hold test_tipc/configs")
    parser.add_argument("--pattern", default="train_*amp*.txt", help="names of texts [%(default)s]")
    parser.add_argument("--lanes", type=int, default=1, help="texts at a time [1]")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // options.lanes)
    lanes: SimpleQueue[set[int]] = SimpleQueue()
    for place in range(options.lanes):
        lanes.put(set(cores[place * size : (place + 1) * size]))
    work = []
    for folder in options.folders:
        configs = folder.resolve() / "test_tipc/configs"
        work += [(configs, f"{path.parent.name}/{path.name}") for path in sorted(configs.glob(f"*/{options.pattern}"))]

    def one(item: tuple[Path, str]) -> dict[str, object]:
        lane = lanes.get()
        try:
            result = run_text(*item, lane)
        finally:
            lanes.put(lane)
        steps = [shown(result["steps"].get(name)) for name in COLUMNS]
        print(f"| {result['text']} | {result['codes']} | {result['seconds']:.0f} | {' | '.join(steps)} |", flush=True)
        return result

    print(f"| text | exit codes | seconds | {' | '.join(COLUMNS)} |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    with ThreadPoolExecutor(options.lanes) as pool:
        results = list(pool.map(one, work))
    bad = [result for result in results if any(result["codes"])]
    print(f"\n{len(results) - len(bad)} of {len(results)} texts ran to the end")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
