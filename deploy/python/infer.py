"""Predict images with an exported model: `python deploy/python/infer.py --config=D/deploy.yaml --image_path=X`."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["infer", *sys.argv[1:]])
