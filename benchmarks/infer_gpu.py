"""GPU latency of exported models: a captured CUDA graph against PyTorch as people run it, in one run.

    PYTHONPATH=src python benchmarks/infer_gpu.py [OUT_FOLDER]

'eager autocast' is the network itself under torch.autocast (float16) in inference mode, channels-last. Every figure holds
copying the images to the GPU and the labels or probabilities back.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from mezzo.export import Description, EngineOptions, ExportOptions, difference, export_model, load_engine
from mezzo.export._network import finish
from mezzo.vision.models import create_model

CASES = {"pp_humanseg_lite": (2, 192, "segmentation"), "mobilenet_v3_small": (1000, 224, "classification")}
CASES["pp_liteseg_stdc1"] = (19, 512, "segmentation")
ROUNDS, RUNS = 5, 30


def median_ms(run, images) -> tuple[float, float, float]:
    for _ in range(10):
        run(images)
    medians = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(RUNS):
            begun = time.perf_counter()
            run(images)
            times.append((time.perf_counter() - begun) * 1e3)
        medians.append(statistics.median(times))
    return statistics.median(medians), min(medians), max(medians)


def stock(network, output_op, dtype):
    """Return PyTorch as people run it."""

    def run(images):
        with torch.inference_mode(), torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            x = torch.from_numpy(images).cuda().contiguous(memory_format=torch.channels_last)
            outputs = network(x)
            logits = outputs[0] if isinstance(outputs, list) else outputs
            return finish(logits.float(), output_op).cpu().numpy()

    return run


def calibrated(name: str, classes: int, size: int) -> torch.nn.Module:
    """Return a network with batch norms that have seen data: as it is initialised, its activations would vanish in half."""
    torch.manual_seed(0)
    network = create_model(name, num_classes=classes)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                torch.nn.init.kaiming_normal_(parameter)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        network.train()
        for _ in range(3):
            network(torch.randn(8, 3, size // 2, size // 2))
    return network.eval()


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, median of {ROUNDS} rounds of {RUNS} runs (range)"
    )
    print("| network | batch | how | ms | images/s | x eager autocast | difference from float32 |")
    print("|---|---|---|---|---|---|---|")
    for name, (classes, size, task) in CASES.items():
        network = calibrated(name, classes, size)
        described = Description(task=task, model_name=name, num_classes=classes, transforms=({"type": "Normalize"},))
        options = ExportOptions(
            save_dir=out / name,
            precisions=("fp16",),
            min_agreement=0.5,
            with_onnx=False,
            input_shape=(-1, 3, size, size),
        )
        model = export_model(network, described, options).model
        network = network.cuda().to(memory_format=torch.channels_last)
        ways = {
            "eager autocast fp16": stock(network, model.output_op, torch.float16),
            "eager fp32": stock(network, model.output_op, torch.float32),
        }
        for engine, precision in (("torch", "fp16"), ("torch-graph", "fp32"), ("torch-graph", "fp16")):
            loaded, _ = load_engine(model, EngineOptions(device="cuda:0", precision=precision), engine)
            ways[f"mezzo {engine} {precision}"] = loaded.run
        for batch in (1, 32):
            images = np.random.default_rng(0).standard_normal((batch, 3, size, size), dtype=np.float32)
            right = load_engine(model, EngineOptions(), "torch")[0].run(images[:2])
            found = {}
            for way, run in ways.items():
                found[way] = median_ms(run, images)
                median, low, high = found[way]
                ratio = found["eager autocast fp16"][0] / median
                distance = difference(run(images)[:2], right)
                print(
                    f"| {name} | {batch} | {way} | {median:.3f} ({low:.3f}..{high:.3f}) | {batch * 1e3 / median:.0f} | "
                    f"{ratio:.2f}x | {distance:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
