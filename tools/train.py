"""Train a network: `python tools/train.py --config X.yml ...`, the same as `train.py` (see --help)."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
