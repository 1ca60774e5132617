"""`python -m mezzo.cli`: the command without its installed script."""

from mezzo.cli._app import main

main()
