"""`python -m mezzo`: the same as the command `mezzo`."""

import runpy

runpy.run_module("mezzo.cli", run_name="__main__")
