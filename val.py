"""Evaluate a network: `python val.py --config X.yml --model_path W.pdparams` (see --help)."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["eval", *sys.argv[1:]])
