"""Export a network: `python export.py --config X.yml --model_path W.pdparams --save_dir D` (see --help)."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
