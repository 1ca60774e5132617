"""Lowered variants of an exported segmentation model against float32, on real images with labels.

    PYTHONPATH=src python benchmarks/infer_precisions.py EXPORT LIST

LIST has `image label` lines, relative to its folder. Prints the share of equal labels and the mIoU of each variant.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from mezzo.export import EngineOptions, load_engine, read_deployed
from mezzo.model.metric import ConfusionMatrix
from mezzo.vision.data import read_label
from mezzo.vision.infer import compose_transforms, read_inputs


def main() -> None:
    model, listed = read_deployed(Path(sys.argv[1])), Path(sys.argv[2])
    pairs = [[listed.parent / name for name in line.split()[:2]] for line in listed.read_text().splitlines() if line]
    labels = [read_label(label) for _, label in pairs]
    found: dict[str, list[np.ndarray]] = {}
    print("| precision | engine | mIoU | same label as float32 |")
    print("|---|---|---|---|")
    for precision in model.variants:
        engine, choice = load_engine(model, EngineOptions(precision=precision), "onnxruntime")
        confusion = ConfusionMatrix(model.num_classes, torch.device("cpu"))
        found[precision] = []
        batches = read_inputs([image for image, _ in pairs], compose_transforms(model), 1)
        for batch, label in zip(batches, labels, strict=True):
            output = engine.run(batch.images)
            found[precision].append(output)
            confusion.update(torch.from_numpy(output).long(), torch.from_numpy(label)[None])
        same = np.mean([np.mean(a == b) for a, b in zip(found[precision], found["fp32"], strict=True)])
        print(f"| {precision} | {choice.engine} | {confusion.scores().mean_iou:.4f} | {same:.4%} |")


if __name__ == "__main__":
    main()
