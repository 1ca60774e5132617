"""Latency of an exported network in Paddle Inference on a CPU, batch 1, float32: one round, the baseline of ours.

Runs in an environment with paddlepaddle and numpy; mezzo is not needed there:

    python benchmarks/paddle_latency.py MODEL_FOLDER --size 192 192 --threads 1 [--warmup 10] [--runs 60] [--no-mkldnn]

The folder holds one network in the `.pdmodel` program format with its `.pdiparams` (`paddle.jit.save` under
`FLAGS_enable_pir_api=0`): with `.json`, oneDNN stops on bilinear resizing in paddlepaddle 3.3.1. What is timed is copying
an image in, running, and copying the result out. Standard output is one line of JSON:

    {"median_ms": 10.644, "p95_ms": 13.09, "threads": 1, "mkldnn": true, "paddle": "3.3.1"}

A shared host drifts: run rounds of both sides alternately, a process each, and compare their ratio.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import inference


def only_file(folder: Path, suffix: str) -> str:
    """Return the one file of the folder with this suffix."""
    found = sorted(folder.glob(f"*{suffix}"))
    if len(found) != 1:
        raise SystemExit(f"{folder}: must hold one file *{suffix}; there are {len(found)}")
    return str(found[0])


def make_config(folder: Path, threads: int, mkldnn: bool) -> inference.Config:
    config = inference.Config(only_file(folder, ".pdmodel"), only_file(folder, ".pdiparams"))
    config.disable_gpu()
    config.disable_glog_info()
    config.switch_ir_optim(True)
    config.enable_memory_optim()
    config.set_cpu_math_library_num_threads(threads)
    if mkldnn:
        config.enable_mkldnn()
    else:
        config.disable_mkldnn()  # in Paddle 3 it is on unless told otherwise
    if config.mkldnn_enabled() != mkldnn:
        raise SystemExit(f"oneDNN cannot be switched {'on' if mkldnn else 'off'} in this build of Paddle")
    return config


def measure(config: inference.Config, size: tuple[int, int], warmup: int, runs: int) -> np.ndarray:
    """Return the milliseconds of each timed run."""
    predictor = inference.create_predictor(config)
    given = predictor.get_input_handle(predictor.get_input_names()[0])
    result = predictor.get_output_handle(predictor.get_output_names()[0])
    image = np.random.default_rng(0).standard_normal((1, 3, *size), dtype=np.float32)
    given.reshape(image.shape)
    times = np.empty(warmup + runs)
    for i in range(len(times)):
        start = time.perf_counter()
        given.copy_from_cpu(image)
        predictor.run()
        result.copy_to_cpu()
        times[i] = time.perf_counter() - start
    return times[warmup:] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="One round of a network's latency in Paddle Inference on a CPU.")
    parser.add_argument("folder", type=Path, metavar="MODEL_FOLDER", help="holds one .pdmodel and one .pdiparams")
    parser.add_argument("--size", type=int, nargs=2, required=True, metavar=("H", "W"), help="of the image")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=10, help="runs that are not timed")
    parser.add_argument("--runs", type=int, default=60, help="runs that are")
    parser.add_argument("--no-mkldnn", dest="mkldnn", action="store_false", help="without oneDNN")
    args = parser.parse_args()
    if args.threads < 1 or args.warmup < 0 or args.runs < 1:
        parser.error("--threads and --runs start at 1, --warmup at 0")
    config = make_config(args.folder, args.threads, args.mkldnn)
    times = measure(config, tuple(args.size), args.warmup, args.runs)
    line = {
        "median_ms": round(float(np.median(times)), 3),
        "p95_ms": round(float(np.percentile(times, 95)), 3),
        "threads": config.cpu_math_library_num_threads(),
        "mkldnn": config.mkldnn_enabled(),
        "paddle": paddle.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
