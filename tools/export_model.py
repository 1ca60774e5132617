"""Export a classifier: `python tools/export_model.py --model=mobilenet_v3_small --pretrained=W` (see --help)."""

import sys

from mezzo.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
