"""Train a network: `python train.py --config X.yml ...` or `python train.py --data-path DIR ...` (see --help)."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
