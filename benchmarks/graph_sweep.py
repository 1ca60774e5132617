"""Many networks of timm and transformers, trained for six steps: float32, mezzo in eager mode, mezzo in graph mode.

`graph_sweep.yml` lists the networks. Each is built small with random weights (nothing is downloaded), without dropout,
and trains on one fixed batch, in its own process with a time limit. A row compares losses, gradients of the first step,
buffers and skipped steps of a backend with those of mezzo's eager mode, and both with float32.

    PYTHONPATH=src python benchmarks/graph_sweep.py [--models timm:xcit,hf:t5] [--backends graphs,inductor,stock_graphs]
        [--dtypes bfloat16,float16] [--level O2] [--plain] [--jobs 2] [--limit 240] [--out rows.jsonl]

Backends: `aot_eager` and `inductor`; `graphs` is Inductor without its code: passes and decompositions run, the graphs
run operator by operator, which takes seconds instead of minutes. `stock_eager`, `stock_aot_eager`, `stock_graphs` and
`stock_inductor` are torch's own `torch.autocast`, to tell a fault of torch from one of mezzo. `--plain` compiles only
the model (`torch.compile(model)` inside `precision.autocast()`). The packages needed are timm and transformers.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from graph_sweep_networks import CASES, build
from torch import Tensor

import mezzo

STEPS = 6
FIRST_SCALE = 2.0**10  # no network skips its first step: its gradients are compared


@functools.cache
def run_inductors_graphs_as_they_are() -> None:
    """From now on Inductor prepares its graphs, but generates no code for them."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def inner(graph: Any, *_: Any, **__: Any) -> Any:
        view_to_reshape(graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    compile_fx.compile_fx = functools.partial(compile_fx.compile_fx, inner_compile=inner)


def train(name: str, backend: str, dtype: str, level: str, plain: bool) -> dict[str, Any]:
    """Train some steps; `backend` float32 and eager are loops, stock ones are torch's own way, others are compiled."""
    model, loss_fn, batch = build(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    is_stock, inner = backend.startswith("stock_"), backend.removeprefix("stock_")
    if inner == "graphs":
        run_inductors_graphs_as_they_are()
        inner = "inductor"
    scaler = mezzo.amp.GradScaler(init_loss_scaling=FIRST_SCALE) if dtype == "float16" else None
    fp8: dict[str, Any] = {"fp8": {"emulate": True, "min_width": 0, "min_size": 0}} if level == "O3" else {}
    is_mezzo = not is_stock and backend != "float32"
    precision = mezzo.Precision(level, dtype, scaler=scaler, **fp8) if is_mezzo else mezzo.Precision("O0")
    model, optimizer = precision.prepare(model, optimizer)
    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    own_step = precision.step

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        if not grads:
            scale = precision.scaler.get_scale() if precision.scaler is not None else 1.0
            trained = [(key, param.grad) for key, param in model.named_parameters() if param.grad is not None]
            grads.update({key: grad.detach().float() / scale for key, grad in trained})
            buffers.update({key: buffer.detach().clone().float() for key, buffer in model.named_buffers()})
        return own_step(*args, **kwargs)

    precision.step = watched_step  # type: ignore[method-assign]
    called = torch.compile(model, backend=inner) if (is_stock or plain) and inner not in ("eager", "float32") else model

    def loop_step(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", getattr(torch, dtype)) if is_stock else precision.autocast():
            loss = loss_fn(called(*tensors[:-1]), tensors[-1])
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        return loss.detach()

    is_loop = not is_mezzo or plain or inner == "eager"
    step = loop_step if is_loop else precision.compile(model, loss_fn, optimizer, backend=inner)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(step(*batch).item())
        seconds.append(time.perf_counter() - start)
    skipped = precision.numbers(wait=True).get("precision/skipped_steps", 0.0)
    timed = {"first_s": seconds[0], "step_s": min(seconds)}
    return {"losses": losses, "grads": grads, "buffers": buffers, "skipped": skipped, **timed}


def compare(ours: dict[str, Any], eager: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """Return the distances from float32's gradients, relative to their norm, and what is suspicious."""
    flags = []
    for number, (a, b, c) in enumerate(zip(exact["losses"], eager["losses"], ours["losses"], strict=True)):
        if not abs(c - b) <= 3 * abs(b - a) + 0.03 * abs(b):
            flags.append(f"loss {number}: {c:.4f}, eager {b:.4f}, float32 {a:.4f}")
            break
    if ours["skipped"] != eager["skipped"]:
        flags.append(f"skipped {ours['skipped']}, eager {eager['skipped']}")
    both = ours["grads"] | eager["grads"]
    if missing := {key for key in set(eager["grads"]) ^ set(ours["grads"]) if both[key].norm() > 0}:
        flags.append(f"gradients of only one side: {sorted(missing)[:4]}")
    total = max(sum(float(grad.square().sum()) for grad in exact["grads"].values()) ** 0.5, 1e-30)
    sums = [0.0, 0.0]
    for key, true in exact["grads"].items():
        found = [side["grads"].get(key, torch.zeros_like(true)) for side in (eager, ours)]
        far = [float(grad.sub(true).norm()) for grad in found]
        sums = [known + new**2 for known, new in zip(sums, far, strict=True)]
        if not far[1] - 2 * far[0] <= 0.1 * max(float(true.norm()), 1e-4 * total):
            flags.append(f"gradient of {key}: {far[1]:.3g} from float32, eager {far[0]:.3g}")
    distances = [value**0.5 / total for value in sums]
    if not distances[1] <= 1.5 * distances[0] + 0.02:
        flags.append(f"gradients {distances[1]:.3f} from float32, eager {distances[0]:.3f}")
    for key, true in exact["buffers"].items():
        b, c = eager["buffers"][key], ours["buffers"][key]
        if not float((c - b).norm()) <= 2 * float((b - true).norm()) + 0.02 * float(true.norm()):
            flags.append(f"buffer {key} differs")
    return {"eager_f32": distances[0], "graph_f32": distances[1], "flags": flags[:6]}


def run_one(name: str, args: argparse.Namespace) -> None:
    """Print the rows of a network as lines of JSON."""
    exact = train(name, "float32", "float32", args.level, False)
    for dtype in args.dtypes.split(","):
        eager: dict[str, Any] | None = None
        for backend in ("eager", *args.backends.split(",")):
            row = {"name": name, "level": args.level, "plain": args.plain, "dtype": dtype, "backend": backend}
            torch._dynamo.reset()
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    ours = train(name, backend, dtype, args.level, args.plain and backend != "eager")
                eager = eager or ours
                row |= {key: ours[key] for key in ("losses", "first_s", "step_s", "skipped")}
                row |= compare(ours, eager, exact) | {"warnings": sorted({str(each.message)[:200] for each in seen})}
            except Exception as error:  # noqa: BLE001  a row of the table
                row["error"] = f"{type(error).__name__}: {str(error)[:800]}"
            print("ROW" + json.dumps(row), flush=True)


def run_in_process(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--one", name, "--backends", args.backends, "--dtypes", args.dtypes]
    command += ["--level", args.level, *(["--plain"] if args.plain else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
        out, end = done.stdout, done.stderr[-600:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, end = (error.stdout or b"").decode(), f"stopped after {args.limit} s"
    rows: list[dict[str, Any]] = [json.loads(line[3:]) for line in out.splitlines() if line.startswith("ROW")]
    rows += [{"name": name, "error": end}] if end else []
    for row in rows:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        found = row.get("error") or "; ".join(row["flags"]) or "ok"
        numbers = "" if "error" in row else "{eager_f32:8.4f} {graph_f32:8.4f} {first_s:6.1f} s".format(**row)
        print(f"{name:26} {row.get('dtype', ''):9} {row.get('backend', ''):12} {numbers:27} {found[:300]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in {"models": "", "backends": "graphs", "dtypes": "bfloat16", "level": "O2", "one": ""}.items():
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=240, help="seconds per network")
    parser.add_argument("--out", type=Path, default=Path("graph_sweep.jsonl"))
    args = parser.parse_args()
    if args.one:
        return run_one(args.one, args)
    names = [name for name in args.models.split(",") if name]
    names = names or [f"{source}:{case}" for source, cases in CASES.items() for case in cases]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for rows in pool.map(lambda name: run_in_process(name, args), names) for row in rows]
    print(f"{len(rows)} rows, {sum(not row.get('error') and not row['flags'] for row in rows)} without a remark")


if __name__ == "__main__":
    main()
