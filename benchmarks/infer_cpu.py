"""CPU latency of exported models against Paddle Inference, batch 1, float32, on one machine in one hour.

Each round of each side is a process of its own; the sides take turns, and medians of the rounds are compared.

    python benchmarks/infer_cpu.py EXPORTS PADDLE_PYTHON PADDLE_MODELS [--rounds 5] > table.md

EXPORTS holds a folder of `mezzo export` for each network, PADDLE_MODELS one with `inference.pdmodel` (see paddle_latency.py),
and PADDLE_PYTHON is a Python with paddlepaddle.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

CASES = {"pp_humanseg_lite": 192, "mobilenet_v3_small": 224, "pp_liteseg_stdc1": 512}
ENGINES = ("onnxruntime", "openvino")
RUNS = 60


def paddle_ms(python: str, models: Path, name: str, size: int, threads: int) -> float:
    script = Path(__file__).with_name("paddle_latency.py")
    command = [python, str(script), str(models / name), "--size", str(size), str(size), "--threads", str(threads)]
    done = subprocess.run([*command, "--warmup", "10", "--runs", str(RUNS)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])["median_ms"]


def mezzo_ms(exports: Path, name: str, size: int, threads: int, engine: str) -> float:
    command = [sys.executable, "-m", "mezzo.cli", "bench", "infer", str(exports / name), "--size", str(size), str(size)]
    command += ["--engines", engine, "--precisions", "fp32", "--threads", str(threads), "--rounds", "1"]
    done = subprocess.run([*command, "--runs", str(RUNS), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["rows"][0]["median_ms"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("exports", type=Path)
    parser.add_argument("paddle_python")
    parser.add_argument("paddle_models", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print("| network | size | threads | Paddle Inference, oneDNN | ONNX Runtime | ratio | OpenVINO | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, size in CASES.items():
        for threads in (1, 2):
            times: dict[str, list[float]] = {side: [] for side in ("paddle", *ENGINES)}
            for _ in range(given.rounds):
                times["paddle"].append(paddle_ms(given.paddle_python, given.paddle_models, name, size, threads))
                for engine in ENGINES:
                    times[engine].append(mezzo_ms(given.exports, name, size, threads, engine))
            medians = {side: statistics.median(values) for side, values in times.items()}
            shown = {side: f"{medians[side]:.2f} ({min(v):.2f}..{max(v):.2f})" for side, v in times.items()}
            ratios = [f"{medians['paddle'] / medians[engine]:.2f}x" for engine in ENGINES]
            cells = [name, f"{size}x{size}", str(threads), shown["paddle"]]
            cells += [shown["onnxruntime"], ratios[0], shown["openvino"], ratios[1]]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
