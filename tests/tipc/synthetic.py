"""Networks that exist only as TIPC texts: ten steps each, whose commands note that they ran and do what they are told.

The tests of clusters and benchmarks/clusters.py use them.
"""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tipc_plans import CONFIG, MODE

from mezzo.tipc import load_run

NUM_STEPS = 10
RAN = "ran.log"
ORDERS = "orders.json"

STUB = """\
import json, os, subprocess, sys, time
from pathlib import Path
kind = {kind!r}
options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
path = options.get("save_dir") or options["config"]
model = path.split("/")[3]
name = " ".join([model, kind, *(options[each] for each in ("cpu_threads", "batch_size") if kind == "infer")])
with open({ran!r}, "a") as file:
    file.write(name + "\\n")
order = json.loads(Path({orders!r}).read_text()).get(name, "")
word, _, value = order.partition(" ")
if word == "sleep":
    child = subprocess.Popen(["setsid", "sleep", value])
    child.wait()
if word == "memory":
    held = bytearray(int(value) * 2**20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    time.sleep(60)
if word == "fill":
    try:
        with open("fill", "wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
    except OSError:
        pass
print(kind, "of", model, "in", os.environ.get("CUDA_VISIBLE_DEVICES", "no card"))
if word == "exit":
    sys.exit(int(value))
result = Path(path) / ("best_model/model.pdparams" if kind == "train" else "deploy.yaml")
if kind != "infer":
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text("result")
"""


def write_networks(root: Path, count: int, threads: str = "1|2|3|4", batches: str = "1|2") -> list[str]:
    """Write texts and stub scripts into a folder; return the paths of the texts."""
    text = CONFIG.replace("gpu_list:0|0,1", "gpu_list:0").replace("--device:cpu|gpu", "--device:cpu")
    text = text.replace("--cpu_threads:6", f"--cpu_threads:{threads}").replace(
        "--batch_size:1\n", f"--batch_size:{batches}\n"
    )
    scripts = {"train": "tools/train.py", "export": "tools/export.py", "infer": "deploy/python/infer.py"}
    for kind, script in scripts.items():
        (root / script).parent.mkdir(parents=True, exist_ok=True)
        (root / script).write_text(STUB.format(kind=kind, ran=RAN, orders=ORDERS))
    (root / "configs/net").mkdir(parents=True, exist_ok=True)
    (root / "configs/net/net.yml").write_text("model: {}\n")
    (root / "img").mkdir(exist_ok=True)
    give_orders(root, {})
    names = []
    for number in range(count):
        name = f"net{number:03d}"
        (root / f"{name}.txt").write_text(text.replace("model_name:net", f"model_name:{name}"))
        names.append(f"{name}.txt")
    return names


def give_orders(root: Path, orders: dict[str, str]) -> None:
    """Tell commands what to do: 'net001 train': 'sleep 60' | 'exit 3' | 'memory 600' | 'fill' (the disk)."""
    part = root / f"{ORDERS}.part"
    part.write_text(json.dumps(orders))
    os.replace(part, root / ORDERS)


def times_run(root: Path) -> Counter[str]:
    """Return how often each command ran."""
    return Counter((root / RAN).read_text().splitlines()) if (root / RAN).exists() else Counter()


def outcome(root: Path) -> dict[str, list[dict]]:
    """Return the records of all networks without times, machines and the place of the folder, ordered by step."""
    found = {}
    for path in sorted(root.glob("test_tipc/output/net*/*/net*")):
        records = [asdict(record) for record in load_run(path).records]
        for record in records:
            for name in ("start", "end", "seconds", "host", "resumed"):
                del record[name]
        texts = (json.dumps(record).replace(str(root), "ROOT") for record in records)
        found[path.name] = sorted(map(json.loads, texts), key=lambda record: record["step"])
    return found


def verdicts(root: Path) -> list[tuple[str, str]]:
    """Return the test cases of the merged JUnit file, with what they say: the report without its times."""
    tree = ElementTree.parse(root / "test_tipc/output/report.xml")
    cases = tree.iter("testcase")
    return sorted(
        (f"{case.get('classname')} {case.get('name')}", " ".join(f"{e.tag} {e.get('message')}" for e in case))
        for case in cases
    )


def statuses(root: Path, name: str) -> dict[str, tuple[str, str]]:
    """Return status and reason of each step of a network."""
    records = load_run(root / f"test_tipc/output/{name}/{MODE}/{name}").records
    return {record.step: (record.status, record.reason) for record in records}


def matrix(root: Path, *words: str, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start `mezzo tipc matrix` for all networks of a folder."""
    texts = sorted(path.name for path in root.glob("net*.txt"))
    command = [sys.executable, "-m", "mezzo", "tipc", "matrix", *texts, *words]
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    STARTED.append(process)
    return process


STARTED: list["subprocess.Popen[str]"] = []


def end_started() -> None:
    """End the runners that a failed test has left."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def run_matrix(root: Path, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `mezzo tipc matrix` to its end; return exit status and output."""
    process = matrix(root, *words, env=env)
    output, _ = process.communicate(timeout=900)
    return process.returncode, output


def wait_for(condition, seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)


def sleepers(seconds: str) -> list[int]:
    """Return the running `sleep SECONDS` processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, str]:
    """Send a signal to a runner and wait for its end."""
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output
