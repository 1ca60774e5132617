"""First step of a compiled network on a CPU: cold, and warm (a new process that finds the caches of the compiler).

Each measurement is a process of its own. `--times N` repeats all of them, in turns; the table has the medians.
Processor time counts the step's process and all that it starts, C++ compilers too: other work on the machine does
not change it much.

    PYTHONPATH=src python benchmarks/first_step.py mobilenet_v3_small@8 fcn_hrnet_w18@2x128x256 --times 3
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

FORMS = ("stock", "mezzo", "mezzo-auto")
"""torch.compile with torch.autocast; `precision.compile` with backend='inductor'; the same with 'auto'."""
CACHES = ("cold", "warm")
COUNTERS = (
    ("aot_autograd", "autograd_cache_hit"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
    ("inductor", "fxgraph_cache_hit"),
    ("inductor", "fxgraph_cache_miss"),
    ("inductor", "fxgraph_cache_bypass"),
)
PHASES = {
    "imports of Inductor": [("_inductor/compile_fx.py", "<module>")],
    "Dynamo": [("_dynamo/convert_frame.py", "compile_inner"), ("-_dynamo/output_graph.py", "call_user_compiler")],
    "mezzo's passes": [
        ("static/_graph.py", "_compile_graph"), ("-_torch/inductor.py", "compile_graph"), ("static/_graph.py", "_tidy"),
        ("static/_graph.py", "_settings"),
    ],
    "mezzo's kernels, installed": [("amp/_kernel_table.py", "install")],
    "AOTAutograd's cache": [("autograd_cache.py", "try_load")],
    "AOTAutograd's trace": [("graph_compile.py", "aot_stage1_graph_capture")],
    "joint passes": [("_inductor/compile_fx.py", "_recursive_joint_graph_passes")],
    "partition": [("_functorch/partitioners.py", "min_cut_rematerialization_partition")],
    "later passes": [("_inductor/compile_fx.py", "_recursive_post_grad_passes")],
    "lowering": [("_inductor/graph.py", "run")],
    "scheduling, code": [("_inductor/graph.py", "codegen")],
    "trials": [("static/_choice.py", "time_gradients")],
}  # fmt: skip
"""By phase: functions that add their time; those with a minus subtract it."""


def processor_s() -> float:
    """Return the processor seconds of this process and all that it started, also of those that still run."""
    children: dict[int, list[int]] = defaultdict(list)
    spent: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        process = int(path.parent.name)
        children[int(fields[1])].append(process)
        spent[process] = sum(map(int, fields[11:15])) / tick
    total, todo = 0.0, [os.getpid()]
    while todo:
        process = todo.pop()
        total += spent.get(process, 0.0)
        todo += children[process]
    return total


def phases_of(profile: cProfile.Profile) -> dict[str, float]:
    """Return the processor seconds of the main thread by phase. The profile itself makes Python slower."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for (path, _, function), (_, _, _, seconds, _) in pstats.Stats(profile).stats.items():
        for parts in PHASES.values():
            for file, name in parts:
                if name == function and path.endswith(file.removeprefix("-")):
                    found[file, name] += seconds
    return {
        phase: sum(-found[part] if part[0].startswith("-") else found[part] for part in parts)
        for phase, parts in PHASES.items()
    }


def stock_step(model: Any, loss_fn: Any, optimizer: Any, batch: Any, dtype: str) -> Callable[[Any], Any]:
    """Return the step of torch.compile and torch.autocast."""
    from mezzo.bench._training import StockPrecision, TrainingLoop
    from mezzo.trial import Workload

    workload = Workload(model, *batch, loss_fn)
    precision = StockPrecision("cpu", dtype)
    return TrainingLoop(workload, optimizer, precision, compile_mode="default", compiles_loss=True).step


def mezzo_step(model: Any, loss_fn: Any, optimizer: Any, dtype: str, form: str) -> Callable[[Any], Any]:
    """Return the step of `precision.compile` at O2."""
    from mezzo import Precision

    precision = Precision("O2", dtype)
    precision.prepare(model, optimizer)
    backend = "auto" if form == "mezzo-auto" else "inductor"
    step = precision.compile(model, loss_fn, optimizer, backend=backend)
    return lambda batch: step(*batch)


def measure(name: str, form: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one step in this process; return its times and torch's counters."""
    import torch

    from mezzo.bench._networks import NetworkSizes, find_network
    from mezzo.kernels import torch_operators_only

    name, _, shape = name.partition("@")
    sizes: dict[str, Any] = {}
    if shape:
        batch, *image = map(int, shape.split("x"))
        sizes = {"batch_size": batch, **({"image_size": tuple(image)} if len(image) == 2 else {})}
    network = find_network(name, NetworkSizes(size=512, simple_net_batch=64, **sizes))
    model, loss_fn, batches = network.make(torch.device("cpu"))
    optimizer = network.make_optimizer(model)
    profile = cProfile.Profile(time.thread_time)
    if options.phases:
        profile.enable()
    start, spent = time.perf_counter(), processor_s()
    with torch_operators_only() if form == "stock" else nullcontext():
        if form == "stock":
            step = stock_step(model, loss_fn, optimizer, batches[0], options.dtype)
        else:
            step = mezzo_step(model, loss_fn, optimizer, options.dtype, form)
        loss = step(batches[0]).item()
    result: dict[str, Any] = {"wall_s": time.perf_counter() - start, "processor_s": processor_s() - spent}
    profile.disable()
    if options.phases:
        result["phases"] = phases_of(profile)
        if options.dump:
            profile.dump_stats(options.dump)
    from torch._dynamo.utils import counters

    result["counters"] = {name: counters[group][name] for group, name in COUNTERS if counters[group][name]}
    result["loss"] = loss
    return result


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="a name of `mezzo bench static --model`, such as NAME@2x128x256")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--phases", action="store_true", help="also print processor time by phase; it takes longer")
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write all figures there")
    options = parser.parse_args()
    unknown = set(options.forms.split(",")) - {*FORMS}
    if unknown:
        parser.error(f"--forms {', '.join(sorted(unknown))}: must be of {', '.join(FORMS)}")
    if options.child:
        print(json.dumps(measure(options.models[0], options.child, options)))
        return 0
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(options.times):
        for model in options.models:
            for form in options.forms.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    for caches in CACHES:
                        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                        command = [sys.executable, __file__, model, "--child", form, "--dtype", options.dtype]
                        command += ["--phases"] if options.phases else []
                        text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
                        found[model, form, caches].append(json.loads(text.stdout.splitlines()[-1]))
                        each = found[model, form, caches][-1]
                        print(model, form, caches, each, file=sys.stderr, flush=True)
    print("| network | form | caches | wall | processor | cache |")
    for (model, form, caches), runs in found.items():
        middle = {key: statistics.median(each[key] for each in runs) for key in ("wall_s", "processor_s")}
        print(
            f"| {model} | {form} | {caches} | {middle['wall_s']:.1f} | {middle['processor_s']:.1f} | {runs[0]['counters']} |"
        )
    if options.json:
        options.json.write_text(json.dumps([[*key, runs] for key, runs in found.items()], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
