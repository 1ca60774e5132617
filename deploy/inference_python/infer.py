"""Predict images with an exported model: `python deploy/inference_python/infer.py --model-dir=D --img-path=X`."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["infer", *sys.argv[1:]])
